/* Preloaded into slurmd of a pool's machines. Hosts of a cluster share this machine's network, where each has an address
 * of its own, but the kernel takes 127.0.0.1 for all that they connect from. Slurm 24.11 reaches a cloud node at the
 * address that it registered from: it connects from its own, which is in SLUICE_OWN_ADDRESS. */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

typedef int connect_function(int, const struct sockaddr *, socklen_t);

/* Failing to bind is no error: then it connects as without this library. */
static void bind_own(int fd)
{
    struct sockaddr_in own = {.sin_family = AF_INET}, bound;
    socklen_t size = sizeof(bound);
    const char *address = getenv("SLUICE_OWN_ADDRESS");
    if (address == NULL || inet_pton(AF_INET, address, &own.sin_addr) != 1) {
        return;
    }
    if (getsockname(fd, (struct sockaddr *)&bound, &size) == 0 && bound.sin_port == 0) {
        (void)bind(fd, (const struct sockaddr *)&own, sizeof(own));
    }
}

__attribute__((visibility("default"))) int connect(int fd, const struct sockaddr *to, socklen_t size)
{
    static connect_function *next;
    if (next == NULL) {
        next = (connect_function *)dlsym(RTLD_NEXT, "connect");
    }
    struct sockaddr_in place;
    if (to->sa_family == AF_INET && size >= sizeof(place)) {
        memcpy(&place, to, sizeof(place));
        if (ntohl(place.sin_addr.s_addr) >> IN_CLASSA_NSHIFT == IN_LOOPBACKNET) {
            bind_own(fd);
        }
    }
    return next(fd, to, size);
}

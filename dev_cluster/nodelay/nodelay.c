/* Preloaded into slurmdbd. Slurm sends the length of a message and the message in two writes on connections that stay
 * open. Nagle's algorithm keeps the second until the first is acknowledged, which the kernel delays by 40 ms: each
 * request took 90 ms, and slurmctld sends a dozen when it starts. So what slurmdbd sends leaves at once, and what it
 * reads is acknowledged at once. */
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <sys/socket.h>
#include <unistd.h>

typedef int accept4_function(int, struct sockaddr *, socklen_t *, int);
typedef ssize_t read_function(int, void *, size_t);

/* Failing is no error: it is then as slow as without this library, or no connection of TCP. */
static void set(int fd, int option)
{
    int kept = errno;
    (void)setsockopt(fd, IPPROTO_TCP, option, &(int){1}, sizeof(int));
    errno = kept;
}

__attribute__((visibility("default"))) int accept4(int fd, struct sockaddr *from, socklen_t *size, int flags)
{
    static accept4_function *next;
    if (next == NULL) {
        next = (accept4_function *)dlsym(RTLD_NEXT, "accept4");
    }
    int accepted = next(fd, from, size, flags);
    if (accepted >= 0) {
        set(accepted, TCP_NODELAY);
    }
    return accepted;
}

__attribute__((visibility("default"))) ssize_t read(int fd, void *buffer, size_t size)
{
    static read_function *next;
    if (next == NULL) {
        next = (read_function *)dlsym(RTLD_NEXT, "read");
    }
    ssize_t got = next(fd, buffer, size);
    if (got > 0) {
        set(fd, TCP_QUICKACK); /* the kernel forgets it */
    }
    return got;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One end of a pipe over UCX, in a process of its own: sluice/serve/replica/ucx.py starts one for each connection.
 *
 *   sluice-ucx check          exits with 0 if UCX is there and has a transport; else says why not, with 1
 *   sluice-ucx take MEMORY    MEMORY: the descriptor of memory that both processes map
 *   sluice-ucx give MEMORY
 *
 * Standard input is a socket of SOCK_SEQPACKET. `take` says WORD_READY and its address; `give` gets that address first, and
 * says WORD_READY. Orders follow, each a range of the memory: to send it as one message, or to receive one of at most that
 * size into it. They are done one after the other, and each is answered by WORD_DONE and the message's size. WORD_FAILED
 * and a reason is the last word. The process ends with its socket: it keeps nothing, and gives the other end no notice.
 *
 * UCX neither encrypts nor proves who sends, and is not made to face attackers. So what is in the memory is encrypted, and
 * neither keys nor what they decrypt are ever in this process, whose registered memory others' adapters may read.
 * libucp is loaded at run time: a host without it has no sluice-ucx that works, and all else does.
 */
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum {
    WORD_READY = 'R',
    WORD_DONE = 'D',
    WORD_FAILED = 'F',
    MOST_ADDRESS = 16384, /* of a node with many adapters: some KiB */
    MOST_ORDERS = 16,
    MOST_STEPS = 1000, /* of UCX, until orders are looked for again */
    LOOK_MS = 1000,
    TAG = 1,
};

struct order {
    uint32_t at, size;
};

static struct {
    __typeof__(&ucp_init_version) init_version;
    __typeof__(&ucp_config_read) config_read;
    __typeof__(&ucp_worker_create) worker_create;
    __typeof__(&ucp_worker_get_address) worker_get_address;
    __typeof__(&ucp_worker_get_efd) worker_get_efd;
    __typeof__(&ucp_worker_arm) worker_arm;
    __typeof__(&ucp_worker_progress) worker_progress;
    __typeof__(&ucp_ep_create) ep_create;
    __typeof__(&ucp_tag_send_nbx) tag_send_nbx;
    __typeof__(&ucp_tag_recv_nbx) tag_recv_nbx;
    __typeof__(&ucp_tag_recv_request_test) tag_recv_request_test;
    __typeof__(&ucp_request_check_status) request_check_status;
    __typeof__(&ucp_request_free) request_free;
    __typeof__(&ucs_status_string) status_string;
} ucx;

static struct {
    int words; /* where they are written */
    ucp_worker_h worker;
    ucp_ep_h end; /* the other one; NULL: this one takes */
    ucs_status_t end_status;
    uint8_t *memory;
    size_t size;
    struct {
        void *request;
        uint32_t size;
    } orders[MOST_ORDERS]; /* a ring */
    size_t first, count;
} pipe_end;

static void say(char word, const void *more, size_t size)
{
    char text[1 + MOST_ADDRESS];
    text[0] = word;
    memcpy(text + 1, more, size);
    ssize_t written;
    do
        written = write(pipe_end.words, text, 1 + size);
    while (written < 0 && errno == EINTR);
    if (written < 0) /* nobody listens any more */
        _exit(1);
}

static _Noreturn void fail(const char *what, const char *why)
{
    char text[512];
    int size = snprintf(text, sizeof(text), "%s: %s", what, why);
    say(WORD_FAILED, text, (size_t)size < sizeof(text) ? (size_t)size : sizeof(text) - 1);
    _exit(1);
}

static void must(const char *what, ucs_status_t status)
{
    if (status != UCS_OK)
        fail(what, ucx.status_string(status));
}

static void load(void)
{
    void *library = dlopen("libucp.so.0", RTLD_NOW | RTLD_GLOBAL); /* its modules look for its symbols */
    if (!library)
        fail("UCX is not installed", dlerror());
    const struct {
        void *function;
        const char *name;
    } names[] = {
        {&ucx.init_version, "ucp_init_version"},
        {&ucx.config_read, "ucp_config_read"},
        {&ucx.worker_create, "ucp_worker_create"},
        {&ucx.worker_get_address, "ucp_worker_get_address"},
        {&ucx.worker_get_efd, "ucp_worker_get_efd"},
        {&ucx.worker_arm, "ucp_worker_arm"},
        {&ucx.worker_progress, "ucp_worker_progress"},
        {&ucx.ep_create, "ucp_ep_create"},
        {&ucx.tag_send_nbx, "ucp_tag_send_nbx"},
        {&ucx.tag_recv_nbx, "ucp_tag_recv_nbx"},
        {&ucx.tag_recv_request_test, "ucp_tag_recv_request_test"},
        {&ucx.request_check_status, "ucp_request_check_status"},
        {&ucx.request_free, "ucp_request_free"},
        {&ucx.status_string, "ucs_status_string"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        void *found = dlsym(library, names[i].name);
        if (!found)
            fail("UCX is too old", names[i].name);
        memcpy(names[i].function, &found, sizeof(found));
    }
}

/*
 * UCX keeps messages that nobody receives, from whoever reaches it and without a bound: this shall end, and not the job.
 * What it has for itself is some 10 MiB over TCP; with RDMA it has receive buffers for each adapter and transport.
 */
static void bound_memory(void)
{
    const rlim_t most = (rlim_t)2 << 30;
    const struct rlimit limit = {most, most};
    (void)setrlimit(RLIMIT_DATA, &limit); /* fails where there is a lower one */
}

static void start(void)
{
    bound_memory();
    load();
    ucp_config_t *config;
    must("configuration of UCX", ucx.config_read(NULL, NULL, &config));
    const ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES,
        .features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP,
    };
    ucp_context_h context;
    must("UCX", ucx.init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context));
    const ucp_worker_params_t of_worker = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    must("UCX", ucx.worker_create(context, &of_worker, &pipe_end.worker));
}

static void map(const char *word)
{
    int memory = atoi(word);
    struct stat facts;
    if (fstat(memory, &facts) != 0 || facts.st_size <= 0)
        fail("memory", strerror(errno));
    pipe_end.size = (size_t)facts.st_size;
    void *mapped = mmap(NULL, pipe_end.size, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (mapped == MAP_FAILED)
        fail("memory", strerror(errno));
    pipe_end.memory = mapped;
}

static void ended(void *about, ucp_ep_h end, ucs_status_t status)
{
    (void)about, (void)end;
    pipe_end.end_status = status;
}

static void connect_to_taker(void)
{
    static uint8_t address[MOST_ADDRESS];
    ssize_t size = recv(STDIN_FILENO, address, sizeof(address), 0);
    if (size <= 0)
        _exit(0);
    const ucp_ep_params_t params = {
        .field_mask =
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = ended},
    };
    must("the other end's address", ucx.ep_create(pipe_end.worker, &params, &pipe_end.end));
    say(WORD_READY, "", 0);
}

static void say_address(void)
{
    ucp_address_t *address;
    size_t size;
    must("address", ucx.worker_get_address(pipe_end.worker, &address, &size));
    if (size > MOST_ADDRESS)
        fail("address", "too long: set UCX_NET_DEVICES");
    say(WORD_READY, address, size);
}

static void begin(struct order order)
{
    if (!order.size || order.at > pipe_end.size || order.size > pipe_end.size - order.at)
        fail("an order", "outside of the memory");
    const ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL};
    uint8_t *range = pipe_end.memory + order.at;
    void *request = pipe_end.end ? ucx.tag_send_nbx(pipe_end.end, range, order.size, TAG, &params)
                                 : ucx.tag_recv_nbx(pipe_end.worker, range, order.size, TAG, UINT64_MAX, &params);
    if (UCS_PTR_IS_ERR(request))
        must("UCX", UCS_PTR_STATUS(request));
    size_t last = (pipe_end.first + pipe_end.count++) % MOST_ORDERS;
    pipe_end.orders[last].request = request;
    pipe_end.orders[last].size = order.size;
}

static bool take_orders(void)
{
    bool any = false;
    while (pipe_end.count < MOST_ORDERS) {
        struct order order;
        ssize_t size = recv(STDIN_FILENO, &order, sizeof(order), MSG_DONTWAIT);
        if (size < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (size != sizeof(order)) /* it is over */
            _exit(0);
        begin(order);
        any = true;
    }
    return any;
}

/* Whether the first order is done; its message's size. */
static bool is_done(uint32_t *size)
{
    void *request = pipe_end.orders[pipe_end.first].request;
    ucs_status_t status;
    *size = pipe_end.orders[pipe_end.first].size;
    if (pipe_end.end) {
        status = ucx.request_check_status(request);
    } else {
        ucp_tag_recv_info_t info = {0};
        status = ucx.tag_recv_request_test(request, &info);
        if (status == UCS_OK)
            *size = (uint32_t)info.length;
    }
    if (status == UCS_INPROGRESS)
        return false;
    must(pipe_end.end ? "sending" : "receiving", status);
    ucx.request_free(request);
    return true;
}

static bool say_what_is_done(void)
{
    bool any = false;
    uint32_t size;
    must("the other end", pipe_end.end_status);
    while (pipe_end.count && is_done(&size)) {
        pipe_end.first = (pipe_end.first + 1) % MOST_ORDERS;
        pipe_end.count--;
        say(WORD_DONE, &size, sizeof(size));
        any = true;
    }
    return any;
}

static _Noreturn void run(void)
{
    int events;
    must("waiting", ucx.worker_get_efd(pipe_end.worker, &events));
    for (;;) {
        for (int i = 0; i < MOST_STEPS && ucx.worker_progress(pipe_end.worker); i++)
            ;
        bool moved = say_what_is_done();
        if (take_orders() || moved)
            continue;
        ucs_status_t status = ucx.worker_arm(pipe_end.worker);
        if (status == UCS_ERR_BUSY)
            continue;
        must("waiting", status);
        struct pollfd files[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = events, .events = POLLIN}};
        (void)poll(files, 2, LOOK_MS);
    }
}

int main(int count, char *words[])
{
    pipe_end.words = STDIN_FILENO;
    if (count == 2 && strcmp(words[1], "check") == 0) {
        pipe_end.words = STDOUT_FILENO;
        start();
        _exit(0); /* what UCX would tidy up, the kernel does */
    }
    bool gives = count == 3 && strcmp(words[1], "give") == 0;
    if (!gives && (count != 3 || strcmp(words[1], "take") != 0)) {
        fputs("usage: sluice-ucx is started by sluice-replica\n", stderr);
        return 2;
    }
    map(words[2]);
    start();
    if (gives)
        connect_to_taker();
    else
        say_address();
    run();
}

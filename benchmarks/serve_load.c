/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Both ends of a gateway's measurement, each one thread that uses little CPU.
 *   serve_load engine PORT DELAY_US GAP_US SLOTS [CERTIFICATE KEY SECRET]
 *     An engine with OpenAI's API that does nothing: DELAY_US to the first token, GAP_US between tokens, at most SLOTS requests at once (others wait
 *     here; /v1/models says as "created" how many it had at most). Each token says when it was sent. With a certificate as a replica: TLS, and the secret as the first line.
 *   serve_load load HOST PORT CONNECTIONS SECONDS RATE PATH BODY_FILE KEY_FILE
 *     Sends the body for so long, at most RATE a second (0: as fast as answers come), each connection with one line of KEY_FILE in turn.
 *     Prints a line for each answer: start_us status first_us total_us tokens whole; and one for some of the tokens: h held_us.
 * Times are CLOCK_MONOTONIC.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_READ = 1 << 16, MOST_EVENTS = 256, MOST_KEYS = 4096 };

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void die(const char *what)
{
    perror(what);
    exit(1);
}

/* ---- bytes that wait ---- */

typedef struct {
    char *data;
    size_t size, room;
} Bytes;

static void add(Bytes *b, const char *data, size_t size)
{
    if (b->size + size + 1 > b->room) {
        b->room = (b->size + size + 1) * 2;
        b->data = realloc(b->data, b->room);
        if (!b->data)
            die("realloc");
    }
    memcpy(b->data + b->size, data, size);
    b->size += size;
    b->data[b->size] = 0;
}

static void drop(Bytes *b, size_t size)
{
    b->size -= size;
    memmove(b->data, b->data + size, b->size);
    if (b->data)
        b->data[b->size] = 0;
}

static const char *header(const char *head, const char *end, const char *name)
{
    size_t length = strlen(name);
    for (const char *line = head; line && line < end; line = strstr(line, "\r\n")) {
        if (line != head)
            line += 2;
        if (strncasecmp(line, name, length) == 0)
            return line + length;
        if (line == head && !strstr(line, "\r\n"))
            break;
    }
    return NULL;
}

/* ---- the engine ---- */

typedef struct Peer {
    int fd;
    SSL *ssl;
    bool trusted, shaken, writing, streams, usage, running, queued, embeds;
    Bytes in, out;
    int64_t due;
    long left, tokens;
    struct Peer *next;
} Peer;

typedef struct {
    int epoll, listener;
    SSL_CTX *tls;
    const char *secret;
    int64_t delay_us, gap_us;
    long slots, running, most;
    Peer *active, *first, *last; /* with a time; and those that wait for a slot */
} Engine;

static void watch(Engine *e, Peer *p, bool writes)
{
    if (p->writing == writes)
        return;
    p->writing = writes;
    struct epoll_event event = {.events = EPOLLIN | (writes ? EPOLLOUT : 0u), .data.ptr = p};
    epoll_ctl(e->epoll, EPOLL_CTL_MOD, p->fd, &event);
}

static void start_next(Engine *e);

static void end_peer(Engine *e, Peer *p)
{
    for (Peer **at = &e->active; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    if (p->queued) {
        Peer *before = NULL;
        for (Peer *one = e->first; one; before = one, one = one->next)
            if (one == p) {
                *(before ? &before->next : &e->first) = p->next;
                if (e->last == p)
                    e->last = before;
                break;
            }
    }
    if (p->running)
        e->running--;
    if (p->ssl)
        SSL_free(p->ssl);
    close(p->fd);
    free(p->in.data);
    free(p->out.data);
    free(p);
    start_next(e);
}

static bool flush(Engine *e, Peer *p)
{
    while (p->out.size) {
        ssize_t done;
        if (p->ssl) {
            ERR_clear_error();
            int n = SSL_write(p->ssl, p->out.data, (int)p->out.size);
            if (n <= 0) {
                int why = SSL_get_error(p->ssl, n);
                if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE)
                    return false;
                watch(e, p, true);
                return true;
            }
            done = n;
        } else {
            done = send(p->fd, p->out.data, p->out.size, MSG_NOSIGNAL);
            if (done < 0) {
                if (errno != EAGAIN)
                    return false;
                watch(e, p, true);
                return true;
            }
        }
        drop(&p->out, (size_t)done);
    }
    watch(e, p, false);
    return true;
}

static void part(Peer *p, const char *text)
{
    char size[16];
    int n = snprintf(size, sizeof size, "%zx\r\n", strlen(text));
    add(&p->out, size, (size_t)n);
    add(&p->out, text, strlen(text));
    add(&p->out, "\r\n", 2);
}

static void whole(Peer *p, const char *text)
{
    char head[160];
    int n = snprintf(head, sizeof head,
                     "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", strlen(text));
    add(&p->out, head, (size_t)n);
    add(&p->out, text, strlen(text));
}

#define CHUNK                                                                                                          \
    "data: "                                                                                                           \
    "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{"         \
    "\"index\":0,\"delta\":"

static void done(Engine *e, Peer *p)
{
    p->running = false;
    e->running--;
    start_next(e);
}

/* The next step of its answer. */
static void step(Engine *e, Peer *p, int64_t now)
{
    char text[1024];
    if (p->embeds) {
        whole(p, "{\"object\":\"list\",\"model\":\"m\",\"data\":[{\"object\":\"embedding\",\"index\":0,\"embedding\":["
                 "0.1,0.2]}],"
                 "\"usage\":{\"prompt_tokens\":3,\"total_tokens\":3}}");
        done(e, p);
        return;
    }
    if (!p->streams) {
        snprintf(text, sizeof text,
                 "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\"choices\":[{"
                 "\"index\":0,\"message\":"
                 "{\"role\":\"assistant\",\"content\":\"t=%lld hello\"},\"finish_reason\":\"stop\"}],"
                 "\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":%ld,\"total_tokens\":%ld}}",
                 (long long)now_us(), p->tokens, p->tokens + 9);
        whole(p, text);
        done(e, p);
        return;
    }
    if (p->left == p->tokens) {
        const char *head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        add(&p->out, head, strlen(head));
        part(p, CHUNK "{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n");
    }
    while (p->left > 0) {
        snprintf(text, sizeof text, CHUNK "{\"content\":\"t=%lld \"},\"finish_reason\":null}]}\n\n",
                 (long long)now_us());
        part(p, text);
        p->left--;
        if (e->gap_us && p->left > 0) {
            p->due = now + e->gap_us;
            p->next = e->active;
            e->active = p;
            return;
        }
    }
    part(p, CHUNK "{},\"finish_reason\":\"stop\"}]}\n\n");
    if (p->usage) {
        snprintf(
            text, sizeof text,
            "data: "
            "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[],"
            "\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":%ld,\"total_tokens\":%ld}}\n\n",
            p->tokens, p->tokens + 9);
        part(p, text);
    }
    part(p, "data: [DONE]\n\n");
    add(&p->out, "0\r\n\r\n", 5);
    done(e, p);
}

static void start(Engine *e, Peer *p)
{
    p->running = true;
    if (++e->running > e->most)
        e->most = e->running;
    if (e->delay_us) {
        p->due = now_us() + e->delay_us;
        p->next = e->active;
        e->active = p;
    } else {
        step(e, p, now_us());
    }
}

static void start_next(Engine *e)
{
    while (e->first && e->running < e->slots) {
        Peer *p = e->first;
        e->first = p->next;
        if (!e->first)
            e->last = NULL;
        p->queued = false;
        start(e, p);
        flush(e, p);
    }
}

/* Take one whole request from what came. */
static bool request(Engine *e, Peer *p)
{
    if (p->running || p->queued || !p->in.size)
        return true;
    char *end = strstr(p->in.data, "\r\n\r\n");
    if (!end)
        return p->in.size < MOST_READ;
    const char *length = header(p->in.data, end + 2, "content-length:");
    size_t size = length ? strtoul(length, NULL, 10) : 0, head = (size_t)(end + 4 - p->in.data);
    if (p->in.size < head + size)
        return true;
    bool post = p->in.data[0] == 'P';
    p->embeds = post && memmem(p->in.data, 64, "/embeddings", 11);
    if (post) {
        const char *body = p->in.data + head;
        const char *most = memmem(body, size, "\"max_tokens\"", 12);
        p->tokens = p->left = most ? strtol(most + 12 + strspn(most + 12, ": "), NULL, 10) : 8;
        const char *stream = memmem(body, size, "\"stream\"", 8);
        p->streams = stream && strncmp(stream + 8 + strspn(stream + 8, ": "), "true", 4) == 0;
        p->usage = memmem(body, size, "include_usage", 13) != NULL;
        drop(&p->in, head + size);
        if (e->running < e->slots) {
            start(e, p);
        } else {
            p->queued = true;
            p->next = NULL;
            *(e->last ? &e->last->next : &e->first) = p;
            e->last = p;
        }
    } else {
        char text[160];
        drop(&p->in, head + size);
        snprintf(text, sizeof text,
                 "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":%ld,\"owned_by\":"
                 "\"engine\"}]}",
                 e->most);
        whole(p, text);
    }
    return true;
}

static bool readable(Engine *e, Peer *p)
{
    char data[MOST_READ];
    if (p->ssl && !p->shaken) {
        ERR_clear_error();
        int n = SSL_accept(p->ssl);
        if (n <= 0) {
            int why = SSL_get_error(p->ssl, n);
            return why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE;
        }
        p->shaken = true;
    }
    for (;;) {
        ssize_t n;
        if (p->ssl) {
            ERR_clear_error();
            n = SSL_read(p->ssl, data, sizeof data);
            if (n <= 0) {
                int why = SSL_get_error(p->ssl, (int)n);
                if (why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE)
                    break;
                return false;
            }
        } else {
            n = recv(p->fd, data, sizeof data, 0);
            if (n == 0 || (n < 0 && errno != EAGAIN))
                return false;
            if (n < 0)
                break;
        }
        add(&p->in, data, (size_t)n);
    }
    if (p->ssl && !p->trusted) {
        size_t size = strlen(e->secret);
        if (p->in.size <= size)
            return true;
        if (memcmp(p->in.data, e->secret, size) != 0 || p->in.data[size] != '\n')
            return false;
        p->trusted = true;
        drop(&p->in, size + 1);
    }
    return request(e, p) && flush(e, p);
}

_Noreturn static void engine(int count, char **words)
{
    Engine e = {.delay_us = atol(words[1]), .gap_us = atol(words[2]), .slots = atol(words[3])};
    if (count > 4) {
        e.tls = SSL_CTX_new(TLS_server_method());
        e.secret = words[6];
        SSL_CTX_set_mode(e.tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
        if (SSL_CTX_use_certificate_file(e.tls, words[4], SSL_FILETYPE_PEM) != 1 ||
            SSL_CTX_use_PrivateKey_file(e.tls, words[5], SSL_FILETYPE_PEM) != 1)
            die("certificate");
    }
    e.listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    int one = 1;
    setsockopt(e.listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[0])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(e.listener, (struct sockaddr *)&address, sizeof address) || listen(e.listener, 4096))
        die("listen");
    e.epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL}, events[MOST_EVENTS];
    epoll_ctl(e.epoll, EPOLL_CTL_ADD, e.listener, &event);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        int64_t now = now_us(), next = now + 1000000;
        for (Peer *p = e.active; p; p = p->next)
            if (p->due < next)
                next = p->due;
        struct timespec wait = {next <= now ? 0 : (next - now) / 1000000,
                                next <= now ? 0 : (next - now) % 1000000 * 1000};
        int ready = epoll_pwait2(e.epoll, events, MOST_EVENTS, &wait, NULL);
        now = now_us();
        Peer *active = e.active;
        e.active = NULL;
        while (active) {
            Peer *p = active;
            active = p->next;
            if (p->due > now) {
                p->next = e.active;
                e.active = p;
            } else {
                step(&e, p, now);
                flush(&e, p);
            }
        }
        for (int i = 0; i < ready; i++) {
            Peer *p = events[i].data.ptr;
            if (!p) {
                int fd = accept4(e.listener, NULL, NULL, SOCK_NONBLOCK);
                if (fd < 0)
                    continue;
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                p = calloc(1, sizeof *p);
                p->fd = fd;
                if (e.tls) {
                    p->ssl = SSL_new(e.tls);
                    SSL_set_fd(p->ssl, fd);
                    SSL_set_accept_state(p->ssl);
                }
                struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = p};
                epoll_ctl(e.epoll, EPOLL_CTL_ADD, fd, &wanted);
                continue;
            }
            bool fine = !(events[i].events & (EPOLLERR | EPOLLHUP));
            if (fine && (events[i].events & EPOLLOUT))
                fine = flush(&e, p);
            if (fine && (events[i].events & EPOLLIN))
                fine = readable(&e, p);
            if (!fine)
                end_peer(&e, p);
        }
    }
}

/* ---- the load ---- */

typedef struct {
    int fd, status;
    bool asked, chunked, headed, whole, streams;
    Bytes in, text, request;
    size_t left, sent;
    int64_t start, first, due;
    long tokens;
} Asker;

typedef struct {
    int epoll;
    struct sockaddr_in address;
    int64_t until;
    long failed;
} Load;

static void report(Load *l, Asker *a, bool complete)
{
    (void)l;
    int64_t now = now_us();
    printf("%lld %d %lld %lld %ld %d\n", (long long)a->start, a->status,
           (long long)(a->first ? a->first - a->start : 0), (long long)(now - a->start), a->tokens, complete);
}

static void hang_up(Load *l, Asker *a)
{
    if (a->fd >= 0) {
        epoll_ctl(l->epoll, EPOLL_CTL_DEL, a->fd, NULL);
        close(a->fd);
    }
    a->fd = -1;
    a->asked = false;
    a->in.size = a->text.size = 0;
}

static void ask(Load *l, Asker *a)
{
    if (a->fd < 0) {
        a->fd = socket(AF_INET, SOCK_STREAM, 0);
        int one = 1;
        setsockopt(a->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (connect(a->fd, (struct sockaddr *)&l->address, sizeof l->address)) {
            close(a->fd);
            a->fd = -1;
            l->failed++;
            a->due = now_us() + 20000;
            return;
        }
        fcntl(a->fd, F_SETFL, O_NONBLOCK);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = a};
        epoll_ctl(l->epoll, EPOLL_CTL_ADD, a->fd, &event);
    }
    a->asked = true;
    a->headed = a->chunked = a->whole = false;
    a->status = 0;
    a->tokens = 0;
    a->first = 0;
    a->in.size = a->text.size = 0;
    a->start = now_us();
    if (send(a->fd, a->request.data, a->request.size, MSG_NOSIGNAL) != (ssize_t)a->request.size) {
        report(l, a, false);
        hang_up(l, a);
    }
}

/* The tokens in what has come of the body. */
static void tokens(Asker *a, int64_t now)
{
    size_t at = 0;
    for (;;) {
        char *found = a->text.size > at ? memmem(a->text.data + at, a->text.size - at, "t=", 2) : NULL;
        if (!found || !memchr(found, ' ', (size_t)(a->text.data + a->text.size - found)))
            break;
        int64_t sent = strtoll(found + 2, NULL, 10);
        at = (size_t)(found - a->text.data) + 3;
        if (sent < 1000)
            continue;
        if (!a->first)
            a->first = now;
        printf("h %lld\n", (long long)(now - sent));
        a->tokens++;
    }
    if (memmem(a->text.data, a->text.size, "[DONE]", 6))
        a->whole = true;
    size_t keep = a->text.size - at > 64 ? a->text.size - 64 : at;
    drop(&a->text, keep > at ? keep : at);
}

/* True when the answer is complete. */
static bool answered(Asker *a, int64_t now)
{
    if (!a->headed) {
        char *end = a->in.size ? strstr(a->in.data, "\r\n\r\n") : NULL;
        if (!end)
            return false;
        a->status = atoi(a->in.data + 9);
        const char *length = header(a->in.data, end + 2, "content-length:"),
                   *coding = header(a->in.data, end + 2, "transfer-encoding:");
        const char *type = header(a->in.data, end + 2, "content-type:");
        a->streams = type && strncmp(type + strspn(type, " "), "text/event-stream", 17) == 0;
        a->chunked = coding != NULL;
        a->left = length ? strtoul(length, NULL, 10) : 0;
        a->headed = true;
        drop(&a->in, (size_t)(end + 4 - a->in.data));
    }
    bool over = false;
    if (!a->chunked) {
        size_t size = a->in.size < a->left ? a->in.size : a->left;
        add(&a->text, a->in.data ? a->in.data : "", size);
        drop(&a->in, size);
        a->left -= size;
        over = a->left == 0;
        if (over && !a->streams)
            a->whole = true;
    }
    while (a->chunked && a->in.size) {
        if (a->left == 0) {
            char *end = memmem(a->in.data, a->in.size, "\r\n", 2);
            if (!end)
                break;
            size_t size = strtoul(a->in.data, NULL, 16);
            if (size == 0) {
                if (a->in.size < (size_t)(end + 4 - a->in.data))
                    break;
                drop(&a->in, (size_t)(end + 4 - a->in.data));
                over = true;
                if (!a->streams)
                    a->whole = true;
                break;
            }
            drop(&a->in, (size_t)(end + 2 - a->in.data));
            a->left = size + 2;
        }
        size_t size = a->in.size < a->left ? a->in.size : a->left;
        size_t text = a->left > 2 ? (size < a->left - 2 ? size : a->left - 2) : 0;
        add(&a->text, a->in.data, text);
        drop(&a->in, size);
        a->left -= size;
    }
    if (a->text.size)
        tokens(a, now);
    return over;
}

static char *read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "r");
    if (!file)
        die(path);
    char *data = malloc(1 << 22);
    *size = fread(data, 1, (1 << 22) - 1, file);
    data[*size] = 0;
    fclose(file);
    return data;
}

static int load(char **words)
{
    Load l = {.epoll = epoll_create1(0),
              .address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[1]))}};
    inet_pton(AF_INET, words[0], &l.address.sin_addr);
    long connections = atol(words[2]), keys = 0;
    double seconds = atof(words[3]), rate = atof(words[4]);
    size_t body_size, key_size;
    char *body = read_file(words[6], &body_size), *key_text = read_file(words[7], &key_size), *key[MOST_KEYS];
    for (char *line = strtok(key_text, "\n"); line && keys < MOST_KEYS; line = strtok(NULL, "\n"))
        key[keys++] = line;
    Asker *askers = calloc((size_t)connections, sizeof *askers);
    int64_t began = now_us(), every = rate > 0 ? (int64_t)(1e6 * (double)connections / rate) : 0;
    l.until = began + (int64_t)(seconds * 1e6);
    for (long i = 0; i < connections; i++) {
        char head[1024];
        int n = snprintf(head, sizeof head,
                         "POST %s HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer %s\r\ncontent-type: "
                         "application/json\r\ncontent-length: %zu\r\n\r\n",
                         words[5], keys ? key[i % keys] : "none", body_size);
        add(&askers[i].request, head, (size_t)n);
        add(&askers[i].request, body, body_size);
        askers[i].fd = -1;
        askers[i].due = began + (every ? every * i / connections : 0);
    }
    struct epoll_event events[MOST_EVENTS];
    char data[MOST_READ];
    long open = connections;
    while (open > 0) {
        int64_t now = now_us(), next = l.until + 60000000;
        open = 0;
        for (long i = 0; i < connections; i++) {
            Asker *a = &askers[i];
            if (!a->asked && now < l.until && a->due <= now) {
                a->due = every ? (a->due + every > now ? a->due + every : now) : now;
                ask(&l, a);
            }
            if (a->asked || now < l.until)
                open++;
            if (!a->asked && a->due < next)
                next = a->due;
        }
        if (now > l.until + 60000000)
            break;
        now = now_us();
        int64_t left = next > now ? next - now : 0;
        if (left > 100000)
            left = 100000;
        struct timespec wait = {0, left * 1000};
        int ready = epoll_pwait2(l.epoll, events, MOST_EVENTS, &wait, NULL);
        for (int i = 0; i < ready; i++) {
            Asker *a = events[i].data.ptr;
            ssize_t n = recv(a->fd, data, sizeof data, 0);
            now = now_us();
            if (n < 0 && errno == EAGAIN)
                continue;
            if (n <= 0) {
                if (a->asked)
                    report(&l, a, false);
                hang_up(&l, a);
                continue;
            }
            add(&a->in, data, (size_t)n);
            if (a->asked && answered(a, now)) {
                report(&l, a, a->whole);
                a->asked = false;
                if (!every)
                    a->due = now;
                if (a->status == 0)
                    hang_up(&l, a);
            }
        }
    }
    printf("failed %ld\n", l.failed);
    return 0;
}

int main(int count, char **words)
{
    signal(SIGPIPE, SIG_IGN);
    if ((count == 6 || count == 9) && strcmp(words[1], "engine") == 0)
        engine(count - 2, words + 2);
    if (count == 10 && strcmp(words[1], "load") == 0)
        return load(words + 2);
    return 2;
}

/* enter NAMESPACE... -- UID GID GROUP,... FOLDER NAME=VALUE... -- PROGRAM ARGUMENT...
 *
 * Runs a program in namespaces (files as in /proc/PID/ns) as a user, with this environment alone, and dies with its
 * starter. It does what nsenter, setpriv and env would do one after the other, in a third of their processor time: tests
 * run tens of thousands of commands inside clusters. Exit codes are env's: 125 when a step fails, 126 and 127 when
 * the program cannot be started; otherwise the program's own, and its signal is raised again. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CANNOT = 125, NOT_RUN = 126, NOT_FOUND = 127, MOST_NAMESPACES = 8, MOST_GROUPS = 64 };

static _Noreturn void fail(const char *what)
{
    fprintf(stderr, "enter: %s: %s\n", what, strerror(errno));
    _exit(CANNOT);
}

static _Noreturn void misused(void)
{
    fputs("usage: enter NAMESPACE... -- UID GID GROUP,... FOLDER NAME=VALUE... -- PROGRAM ARGUMENT...\n", stderr);
    _exit(CANNOT);
}

static unsigned number(const char *word, char **end)
{
    errno = 0;
    unsigned long value = strtoul(word, end, 10);
    if (errno != 0 || *end == word || value >= (unsigned)-1) {
        misused();
    }
    return (unsigned)value;
}

static unsigned id(const char *word)
{
    char *end;
    unsigned value = number(word, &end);
    if (*end != '\0') {
        misused();
    }
    return value;
}

static void become(char *words[4])
{
    gid_t groups[MOST_GROUPS];
    size_t count = 0;
    for (char *next = words[2]; *next != '\0'; next += *next == ',') {
        if (count == MOST_GROUPS) {
            misused();
        }
        groups[count++] = number(next, &next);
        if (*next != ',' && *next != '\0') {
            misused();
        }
    }
    uid_t uid = id(words[0]);
    gid_t gid = id(words[1]);
    if (setgroups(count, groups) != 0 || setresgid(gid, gid, gid) != 0 || setresuid(uid, uid, uid) != 0) {
        fail("user");
    }
    if (chdir(words[3]) != 0) {
        fail(words[3]);
    }
}

/* Ends as the child ends, and stops and goes on with it. */
static _Noreturn void follow(pid_t child)
{
    int status;
    for (;;) {
        if (waitpid(child, &status, WUNTRACED) < 0) {
            if (errno == EINTR) {
                continue;
            }
            fail("waitpid");
        }
        if (!WIFSTOPPED(status)) {
            break;
        }
        (void)raise(SIGSTOP);
        (void)kill(child, SIGCONT);
    }
    if (WIFSIGNALED(status)) {
        (void)signal(WTERMSIG(status), SIG_DFL);
        (void)raise(WTERMSIG(status));
        _exit(128 + WTERMSIG(status));
    }
    _exit(WEXITSTATUS(status));
}

int main(int argc, char **argv)
{
    int spaces[MOST_NAMESPACES];
    int count = 0, at = 1;
    /* All are opened before one is entered, where /proc is another. */
    for (; at < argc && strcmp(argv[at], "--") != 0; at++) {
        if (count == MOST_NAMESPACES) {
            misused();
        }
        spaces[count] = open(argv[at], O_RDONLY | O_CLOEXEC);
        if (spaces[count++] < 0) {
            fail(argv[at]);
        }
    }
    char **user = argv + at + 1;
    int last = at + 5;
    while (last < argc && strcmp(argv[last], "--") != 0) {
        last++;
    }
    if (last + 1 >= argc) {
        misused();
    }
    argv[last] = NULL;
    char **program = argv + last + 1;
    for (int i = 0; i < count; i++) {
        if (setns(spaces[i], 0) != 0) {
            fail(argv[i + 1]);
        }
    }
    pid_t child = fork(); /* only a child is in the PID namespace */
    if (child < 0) {
        fail("fork");
    }
    if (child > 0) {
        follow(child);
    }
    become(user);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) { /* a change of the user would undo it */
        fail("prctl");
    }
    environ = user + 4; /* with the PATH in which the program is looked for */
    execvp(program[0], program);
    int error = errno;
    fprintf(stderr, "enter: %s: %s\n", program[0], strerror(error));
    _exit(error == ENOENT ? NOT_FOUND : NOT_RUN);
}

/* A disk that fails: the n-th call that changes something under a folder is refused, or is the last one of the process.
 *
 * Loaded by LD_PRELOAD. A crash is that of the machine: what was written and not synced is lost. Told by `disk_fails`, or
 * before the program starts by the variables FAILING_DISK (a folder), FAILING_CALL, FAILING_ERROR and FAILING_RANK.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FILES = 64, CRASH = -1 };

static char folder[PATH_MAX];
static char unsynced[FILES][PATH_MAX];
static int at, seen, failure;

/* The next `number`-th change under `where` fails with `error`, or ends the process if that is CRASH. 0: only count. */
void disk_fails(const char *where, int number, int error)
{
    strncpy(folder, where, PATH_MAX - 1);
    at = number, seen = 0, failure = error;
}

int disk_calls(void) { return seen; }

/* A rank learns which one it is after it was forked. */
static void listen_once(void)
{
    static int told;
    const char *where = getenv("FAILING_DISK"), *rank = getenv("RANK");
    if (told || !rank) return;
    told = 1;
    if (where && !strcmp(rank, getenv("FAILING_RANK")))
        disk_fails(where, atoi(getenv("FAILING_CALL")), atoi(getenv("FAILING_ERROR")));
}

static int is_inside(const char *path)
{
    listen_once();
    return folder[0] && !strncmp(path, folder, strlen(folder));
}

static int path_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_inside(path);
}

static void lose_what_is_unsynced(void)
{
    for (int i = 0; i < FILES; i++)
        if (unsynced[i][0] && truncate(unsynced[i], 0)) unsynced[i][0] = 0;
}

static void note(const char *path, int synced)
{
    int free = -1;
    for (int i = 0; i < FILES; i++) {
        if (!strcmp(unsynced[i], path)) {
            if (synced) unsynced[i][0] = 0;
            return;
        }
        if (!unsynced[i][0]) free = i;
    }
    if (!synced && free >= 0) strcpy(unsynced[free], path);
}

/* Whether this change is refused. */
static int is_refused(void)
{
    if (++seen != at) return 0;
    if (failure == CRASH) {
        lose_what_is_unsynced();
        _exit(137);
    }
    errno = failure;
    return 1;
}

#define REAL(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

static int opened(const char *name, const char *path, int flags, int mode)
{
    if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && is_inside(path) && is_refused()) return -1;
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name))(path, flags, mode);
}

int open(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    int mode = va_arg(more, int);
    va_end(more);
    return opened("open", path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    int mode = va_arg(more, int);
    va_end(more);
    return opened("open64", path, flags, mode);
}

ssize_t write(int fd, const void *bytes, size_t count)
{
    char path[PATH_MAX];
    if (path_of(fd, path)) {
        note(path, 0);
        if (is_refused()) return -1;
    }
    return REAL(ssize_t, write, int, const void *, size_t)(fd, bytes, count);
}

int fsync(int fd)
{
    char path[PATH_MAX];
    if (path_of(fd, path)) {
        if (is_refused()) return -1;
        note(path, 1);
    }
    return REAL(int, fsync, int)(fd);
}

int mkdir(const char *path, mode_t mode)
{
    if (is_inside(path) && is_refused()) return -1;
    return REAL(int, mkdir, const char *, mode_t)(path, mode);
}

int rename(const char *from, const char *to)
{
    if (is_inside(to) && is_refused()) return -1;
    size_t length = strlen(from);
    for (int i = 0; i < FILES; i++)
        if (!strncmp(unsynced[i], from, length) && unsynced[i][length] == '/') {
            char rest[PATH_MAX];
            strcpy(rest, unsynced[i] + length);
            snprintf(unsynced[i], PATH_MAX, "%s%s", to, rest);
        }
    return REAL(int, rename, const char *, const char *)(from, to);
}

int unlinkat(int at_folder, const char *name, int flags)
{
    char path[PATH_MAX];
    if ((path_of(at_folder, path) || is_inside(name)) && is_refused()) return -1;
    return REAL(int, unlinkat, int, const char *, int)(at_folder, name, flags);
}

int rmdir(const char *path)
{
    if (is_inside(path) && is_refused()) return -1;
    return REAL(int, rmdir, const char *)(path);
}

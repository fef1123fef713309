/* Preloaded into a process, it makes its file calls fail, kills it at one of them, or records them; see shim.py.
 *
 * Every interposed call goes straight to the kernel. Without anything armed and without a trace that is all it does.
 * Nothing is allocated. One process at a time writes a trace; paths are compared as the kernel names them. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, RENAME = 4, TRUNCATE = 8, UNLINK = 16, CREATE = 32, ALLOCATE = 64, READ = 128, FOLDER = 256,
       MARK = 512, SHORT = 1u << 30 };
enum { THROUGH, FAIL, HALF };

struct control { uint32_t armed, calls; int32_t error; uint32_t sticky; int64_t after; char path[40]; };
struct call { uint32_t kind, path_length; int64_t offset; uint64_t length; };

static struct control *control;
static int trace = -1;
static char root[PATH_MAX];
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER; /* that of the trace is that of the calls */

/* A signal handler may write, too (Python's does), so none runs while the order is held. */
static void enter(sigset_t *before)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, before);
    pthread_mutex_lock(&order);
}

static void leave(const sigset_t *before)
{
    pthread_mutex_unlock(&order);
    pthread_sigmask(SIG_SETMASK, before, NULL);
}

static int sys_open(int folder, const char *path, int flags, int mode)
{
    return syscall(SYS_openat, folder, path, flags, mode);
}

__attribute__((constructor)) static void begin(void)
{
    const char *name;
    if ((name = getenv("RETAKE_SHIM_CONTROL"))) {
        int fd = sys_open(AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0);
        control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (control == MAP_FAILED) { perror("RETAKE_SHIM_CONTROL"); abort(); }
        close(fd);
    }
    if ((name = getenv("RETAKE_SHIM_TRACE"))) {
        strncpy(root, getenv("RETAKE_SHIM_ROOT") ? getenv("RETAKE_SHIM_ROOT") : "/", PATH_MAX - 1);
        trace = sys_open(AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (trace < 0) { perror("RETAKE_SHIM_TRACE"); abort(); }
    }
}

static int watched(unsigned kind)
{
    return (trace >= 0 && kind != READ) || (control && control->armed && (control->calls & kind));
}

static void path_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, fd == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

static void path_at(int folder, const char *name, char *path)
{
    if (*name == '/') { snprintf(path, PATH_MAX, "%s", name); return; }
    path_of(folder, path);
    size_t length = strlen(path);
    snprintf(path + length, PATH_MAX - length, "/%s", name);
}

/* Whether this call is let through, fails (errno is set) or does half of its work; or it is the last one. */
static int verdict(unsigned kind, const char *path, const char *other)
{
    if (!control || !control->armed || !(control->calls & kind)) return THROUGH;
    if (*control->path && !strstr(path, control->path) && !strstr(other, control->path)) return THROUGH;
    if (__atomic_fetch_sub(&control->after, 1, __ATOMIC_SEQ_CST) > 0) return THROUGH;
    if (kind == WRITE && (__atomic_fetch_and(&control->calls, ~SHORT, __ATOMIC_SEQ_CST) & SHORT)) return HALF;
    if (control->armed == 2) kill(getpid(), SIGKILL);
    if (!control->sticky && !__atomic_exchange_n(&control->armed, 0, __ATOMIC_SEQ_CST)) return THROUGH;
    errno = control->error;
    return FAIL;
}

/* The first `limit` bytes of `parts`, as `cut`; returns how many parts that is. */
static int first_bytes(const struct iovec *parts, int count, size_t limit, struct iovec *cut)
{
    int used = 0;
    for (; used < count && limit; used++) {
        cut[used] = parts[used];
        if (cut[used].iov_len > limit) cut[used].iov_len = limit;
        limit -= cut[used].iov_len;
    }
    return used;
}

static void record(unsigned kind, const char *path, int64_t offset, const struct iovec *parts, int count, size_t length)
{
    size_t beneath = strlen(root);
    if (trace < 0 || strncmp(path, root, beneath) || (path[beneath] && path[beneath] != '/' && beneath > 1)) return;
    int before = errno;
    struct call call = { kind, strlen(path), offset, length };
    struct iovec head[2] = { { &call, sizeof call }, { (void *)path, call.path_length } }, cut[IOV_MAX];
    ssize_t size = syscall(SYS_writev, trace, head, 2);
    int used = first_bytes(parts, count, length, cut);
    if (used) size += syscall(SYS_writev, trace, cut, used);
    if (size != (ssize_t)(sizeof call + call.path_length + length)) { perror("the shim's trace"); abort(); }
    errno = before;
}

void retake_mark(const void *data, size_t size)
{
    struct iovec part = { (void *)data, size };
    sigset_t before;
    enter(&before);
    record(MARK, root, 0, &part, 1, size);
    leave(&before);
}

static ssize_t put(int fd, const struct iovec *parts, int count, off64_t offset, int flags)
{
    if (!watched(WRITE) || count > IOV_MAX) return syscall(SYS_pwritev2, fd, parts, count, offset, 0, flags);
    char path[PATH_MAX];
    struct iovec cut[IOV_MAX];
    size_t size = 0;
    path_of(fd, path);
    int how = verdict(WRITE, path, "");
    if (how == FAIL) return -1;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    count = first_bytes(parts, count, how == HALF && size > 1 ? size / 2 : size, cut);
    sigset_t before;
    enter(&before);
    ssize_t done = syscall(SYS_pwritev2, fd, cut, count, offset, 0, flags);
    if (done > 0) record(WRITE, path, offset < 0 ? lseek(fd, 0, SEEK_CUR) - done : offset, cut, count, done);
    leave(&before);
    if (how == HALF && control->armed == 2) kill(getpid(), SIGKILL);
    return done;
}

#define ONE(data, size) &(struct iovec){ (void *)(data), size }, 1
ssize_t write(int fd, const void *data, size_t size) { return put(fd, ONE(data, size), -1, 0); }
ssize_t writev(int fd, const struct iovec *parts, int count) { return put(fd, parts, count, -1, 0); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return put(fd, ONE(data, size), at, 0); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return put(fd, ONE(data, size), at, 0); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) { return put(fd, parts, count, at, 0); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { return put(fd, parts, count, at, 0); }
ssize_t pwritev64v2(int fd, const struct iovec *parts, int n, off64_t at, int f) { return put(fd, parts, n, at, f); }
ssize_t pwritev2(int fd, const struct iovec *parts, int n, off_t at, int f) { return put(fd, parts, n, at, f); }

/* A call on a descriptor that moves no data: `size` is the new one, where there is one. */
static int change(unsigned kind, int fd, int64_t size, long number, long a, long b, long c)
{
    char path[PATH_MAX];
    if (!watched(kind)) return syscall(number, fd, a, b, c);
    path_of(fd, path);
    if (verdict(kind, path, "") == FAIL) return -1;
    sigset_t before;
    enter(&before);
    int result = syscall(number, fd, a, b, c);
    if (result == 0) record(kind, path, size, NULL, 0, 0);
    leave(&before);
    return result;
}

int fsync(int fd) { return change(SYNC, fd, 0, SYS_fsync, 0, 0, 0); }
int fdatasync(int fd) { return change(SYNC, fd, 0, SYS_fdatasync, 0, 0, 0); }
int ftruncate64(int fd, off64_t size) { return change(TRUNCATE, fd, size, SYS_ftruncate, size, 0, 0); }
int ftruncate(int fd, off_t size) { return change(TRUNCATE, fd, size, SYS_ftruncate, size, 0, 0); }
int posix_fallocate64(int fd, off64_t at, off64_t size)
{
    int before = errno, failed = change(ALLOCATE, fd, at + size, SYS_fallocate, 0, at, size) ? errno : 0;
    errno = before;
    return failed;
}
int posix_fallocate(int fd, off_t at, off_t size) { return posix_fallocate64(fd, at, size); }

/* A call on names; `to` is the second one or NULL. */
static int move(unsigned kind, int folder, const char *name, int other, const char *to, int flags)
{
    char path[PATH_MAX], target[PATH_MAX] = "";
    if (watched(kind)) {
        path_at(folder, name, path);
        if (to) path_at(other, to, target);
        if (verdict(kind, path, target) == FAIL) return -1;
    }
    sigset_t before;
    enter(&before);
    int result = to ? syscall(SYS_renameat2, folder, name, other, to, flags)
                    : syscall(SYS_unlinkat, folder, name, flags);
    size_t size = strlen(target);
    if (result == 0 && trace >= 0) record(kind, path, flags, &(struct iovec){ target, size }, 1, size);
    leave(&before);
    return result;
}

int rename(const char *from, const char *to) { return move(RENAME, AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return move(RENAME, a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned f) { return move(RENAME, a, from, b, to, f); }
int unlink(const char *name) { return move(UNLINK, AT_FDCWD, name, 0, NULL, 0); }
int unlinkat(int folder, const char *name, int flags) { return move(UNLINK, folder, name, 0, NULL, flags); }
int rmdir(const char *name) { return move(UNLINK, AT_FDCWD, name, 0, NULL, AT_REMOVEDIR); }

/* open with O_CREAT and mkdir; only what did not exist before is recorded as made. */
static int make(unsigned kind, int folder, const char *name, int flags, int mode)
{
    char path[PATH_MAX];
    if (!(flags & O_CREAT) || !watched(kind))
        return kind == FOLDER ? (int)syscall(SYS_mkdirat, folder, name, mode) : sys_open(folder, name, flags, mode);
    path_at(folder, name, path);
    if (verdict(kind, path, "") == FAIL) return -1;
    sigset_t before;
    enter(&before);
    int is_new = syscall(SYS_faccessat, folder, name, F_OK) != 0;
    int result = kind == FOLDER ? (int)syscall(SYS_mkdirat, folder, name, mode) : sys_open(folder, name, flags, mode);
    if (result >= 0 && is_new) record(kind, path, 0, NULL, 0, 0);
    else if (result >= 0 && (flags & O_TRUNC)) record(TRUNCATE, path, 0, NULL, 0, 0);
    leave(&before);
    return result;
}

int mkdir(const char *name, mode_t mode) { return make(FOLDER, AT_FDCWD, name, O_CREAT, mode); }
int mkdirat(int folder, const char *name, mode_t mode) { return make(FOLDER, folder, name, O_CREAT, mode); }

#define MODE(flags) ({ va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
                       flags & (O_CREAT | __O_TMPFILE) ? mode : 0; })
int open(const char *name, int flags, ...) { return make(CREATE, AT_FDCWD, name, flags, MODE(flags)); }
int open64(const char *name, int flags, ...) { return make(CREATE, AT_FDCWD, name, flags, MODE(flags)); }
int openat(int folder, const char *name, int flags, ...) { return make(CREATE, folder, name, flags, MODE(flags)); }
int openat64(int folder, const char *name, int flags, ...) { return make(CREATE, folder, name, flags, MODE(flags)); }

static int unreadable(int fd)
{
    char path[PATH_MAX] = "";
    if (!watched(READ)) return 0;
    path_of(fd, path);
    return verdict(READ, path, "") == FAIL;
}

ssize_t read(int fd, void *data, size_t size) { return unreadable(fd) ? -1 : syscall(SYS_read, fd, data, size); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at)
{
    return unreadable(fd) ? -1 : syscall(SYS_pread64, fd, data, size, at);
}
ssize_t pread(int fd, void *data, size_t size, off_t at) { return pread64(fd, data, size, at); }

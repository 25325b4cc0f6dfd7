/* Counts what a process does to files below a folder, and kills it, or says that the disk is full, at a given call.
   Built and preloaded by faults.py. Of stdio only fwrite is seen: it is flushed, so that it counts as one write. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static int counted, at, full, journal = -1;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

/* folder: an absolute path; kill: the process ends after this call, 0 never; enospc: this write and all later ones fail,
   0 none; log: a descriptor that gets a line for each call. */
void faults_arm(const char *folder, int kill, int enospc, int log) {
    snprintf(root, sizeof root, "%s/", folder);
    counted = 0, at = kill, full = enospc, journal = log;
}

static int below(const char *path) {
    char whole[PATH_MAX * 2];
    if (!root[0] || !path) return 0;
    if (path[0] == '/') return !strncmp(path, root, strlen(root));
    if (!getcwd(whole, PATH_MAX)) return 0;
    strncat(strncat(whole, "/", 2), path, PATH_MAX - 2);
    return !strncmp(whole, root, strlen(root));
}

static const char *path_of(int file) {
    static __thread char path[PATH_MAX];
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 2);
    if (size < 0) return NULL;
    path[size] = 0;
    return path;
}

/* 1: the call must fail with ENOSPC. */
static int before(const char *path) {
    if (!full || !below(path)) return 0;
    return counted + 1 >= full;
}

static void after(const char *kind, const char *path) {
    if (!below(path)) return;
    int keep = errno;
    pthread_mutex_lock(&guard);
    ++counted;
    char line[PATH_MAX + 64];
    int size = snprintf(line, sizeof line, "%s %s\n", kind, path + strlen(path[0] == '/' ? root : ""));
    if (journal >= 0) syscall(SYS_write, journal, line, size);
    if (at && counted == at) syscall(SYS_kill, getpid(), SIGKILL);
    pthread_mutex_unlock(&guard);
    errno = keep;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define ON_FILE(type, name, kind, writes, given, passed) \
    type name given { \
        REAL(name); \
        const char *path = root[0] ? path_of(file) : NULL; \
        if (writes && path && before(path)) { errno = ENOSPC; return -1; } \
        type done = real passed; \
        if (path) after(kind, path); \
        return done; \
    }
ON_FILE(ssize_t, write, "write", 1, (int file, const void *bytes, size_t size), (file, bytes, size))
ON_FILE(ssize_t, pwrite, "write", 1, (int file, const void *bytes, size_t size, off_t from), (file, bytes, size, from))
ON_FILE(ssize_t, pwrite64, "write", 1, (int file, const void *bytes, size_t size, off64_t from), (file, bytes, size, from))
ON_FILE(ssize_t, writev, "write", 1, (int file, const struct iovec *parts, int count), (file, parts, count))
ON_FILE(int, ftruncate, "write", 0, (int file, off_t size), (file, size))
ON_FILE(int, ftruncate64, "write", 0, (int file, off64_t size), (file, size))
ON_FILE(int, fsync, "fsync", 0, (int file), (file))
ON_FILE(int, fdatasync, "fsync", 0, (int file), (file))

#define ON_PATH(name, kind, path, given, passed) \
    int name given { REAL(name); int done = real passed; after(kind, path); return done; }
ON_PATH(rename, "rename", to, (const char *from, const char *to), (from, to))
ON_PATH(renameat, "rename", to, (int a, const char *from, int b, const char *to), (a, from, b, to))
ON_PATH(renameat2, "rename", to, (int a, const char *from, int b, const char *to, unsigned how), (a, from, b, to, how))
ON_PATH(unlink, "unlink", path, (const char *path), (path))
ON_PATH(rmdir, "unlink", path, (const char *path), (path))

int unlinkat(int folder, const char *name, int how) {  /* shutil.rmtree names files from the folder that holds them */
    REAL(unlinkat);
    char path[PATH_MAX * 2];
    const char *above = folder == AT_FDCWD || name[0] == '/' ? NULL : path_of(folder);
    snprintf(path, sizeof path, above ? "%s/%s" : "%.0s%s", above ? above : "", name);
    int done = real(folder, name, how);
    after("unlink", path);
    return done;
}

size_t fwrite(const void *bytes, size_t size, size_t count, FILE *stream) {
    REAL(fwrite);
    const char *path = root[0] ? path_of(fileno(stream)) : NULL;
    if (path && before(path)) { errno = ENOSPC; return 0; }
    size_t done = real(bytes, size, count, stream);
    if (path && below(path)) { fflush(stream); after("write", path); }
    return done;
}

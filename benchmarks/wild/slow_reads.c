/* Reads of files below $SLOW_DIR take $SLOW_MS milliseconds longer: a remote file system for any program.
   Reads that give nothing (the end of a file) cost nothing more, as on file systems that cache attributes.
   gcc -O2 -shared -fPIC slow_reads.c -o slow_reads.so -ldl;  SLOW_DIR=... SLOW_MS=30 LD_PRELOAD=./slow_reads.so ... */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int is_slow(int fd) {
    char link[64], path[512];
    const char *dir = getenv("SLOW_DIR");
    if (!dir) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return strncmp(path, dir, strlen(dir)) == 0;
}
static ssize_t after(int fd, ssize_t result) {
    if (result > 0 && is_slow(fd)) {
        const char *ms = getenv("SLOW_MS");
        long m = ms ? atol(ms) : 30;
        struct timespec t = {m / 1000, (m % 1000) * 1000000L};
        nanosleep(&t, 0);
    }
    return result;
}
#define NEXT(name) if (!next) next = dlsym(RTLD_NEXT, #name)
#define SLOW(name, off)                                      \
    ssize_t name(int fd, void *b, size_t n, off o) {         \
        static ssize_t (*next)(int, void *, size_t, off);    \
        NEXT(name);                                          \
        return after(fd, next(fd, b, n, o));                 \
    }
SLOW(pread, off_t)
SLOW(pread64, off64_t)
ssize_t read(int fd, void *b, size_t n) {
    static ssize_t (*next)(int, void *, size_t);
    NEXT(read);
    return after(fd, next(fd, b, n));
}
ssize_t readv(int fd, const struct iovec *v, int n) {
    static ssize_t (*next)(int, const struct iovec *, int);
    NEXT(readv);
    return after(fd, next(fd, v, n));
}

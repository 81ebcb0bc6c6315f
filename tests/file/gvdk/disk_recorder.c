// Records what a process does to one file: each write, change of size and sync, in their order.
//
// Loaded before the C library (LD_PRELOAD). `record_begin` names the file by its descriptor, and a
// descriptor to which events go: kind and two numbers of 8 bytes each, and of a write its bytes.
// `record_mark` adds an event of the test's own.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kWrite, kSize, kSync, kMark };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stat recorded;
static int to = -1;

static void note(uint64_t kind, uint64_t first, uint64_t second, const void* data, size_t n) {
  const uint64_t head[3] = {kind, first, second};
  const struct iovec parts[2] = {{(void*)head, sizeof head}, {(void*)data, n}};
  if (writev(to, parts, 2) != (ssize_t)(sizeof head + n)) _exit(99);
}
static int is_recorded(int fd) {
  struct stat found;
  return to >= 0 && fstat(fd, &found) == 0 && found.st_dev == recorded.st_dev &&
         found.st_ino == recorded.st_ino;
}
void record_begin(int fd, int events) {
  fstat(fd, &recorded);
  to = events;
}
void record_mark(uint64_t number) {
  pthread_mutex_lock(&lock);
  note(kMark, number, 0, NULL, 0);
  pthread_mutex_unlock(&lock);
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

// A write is noted while nobody else changes the file, so that events have the order of the file.
static ssize_t written(int fd, const void* data, size_t n, off64_t offset) {
  if (!is_recorded(fd)) return REAL(pwrite64)(fd, data, n, offset);
  pthread_mutex_lock(&lock);
  const ssize_t done = REAL(pwrite64)(fd, data, n, offset);
  if (done > 0) note(kWrite, (uint64_t)offset, (uint64_t)done, data, (size_t)done);
  pthread_mutex_unlock(&lock);
  return done;
}
ssize_t pwrite64(int fd, const void* data, size_t n, off64_t offset) {
  return written(fd, data, n, offset);
}
ssize_t pwrite(int fd, const void* data, size_t n, off_t offset) {
  return written(fd, data, n, offset);
}
long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long given[6];
  for (int i = 0; i < 6; ++i) given[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_pwrite64) return written((int)given[0], (void*)given[1], given[2], given[3]);
  return REAL(syscall)(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
// Holes and ranges of zeros; only within the file.
int fallocate64(int fd, int mode, off64_t offset, off64_t n) {
  if (!is_recorded(fd)) return REAL(fallocate64)(fd, mode, offset, n);
  pthread_mutex_lock(&lock);
  const int result = REAL(fallocate64)(fd, mode, offset, n);
  if (result == 0) {
    void* zeros = calloc(1, (size_t)n);
    note(kWrite, (uint64_t)offset, (uint64_t)n, zeros, (size_t)n);
    free(zeros);
  }
  pthread_mutex_unlock(&lock);
  return result;
}
int fallocate(int fd, int mode, off_t offset, off_t n) { return fallocate64(fd, mode, offset, n); }
static int sized(int fd, off64_t size) {
  if (!is_recorded(fd)) return REAL(ftruncate64)(fd, size);
  pthread_mutex_lock(&lock);
  const int result = REAL(ftruncate64)(fd, size);
  if (result == 0) note(kSize, (uint64_t)size, 0, NULL, 0);
  pthread_mutex_unlock(&lock);
  return result;
}
int ftruncate64(int fd, off64_t size) { return sized(fd, size); }
int ftruncate(int fd, off_t size) { return sized(fd, size); }
int fdatasync(int fd) {
  if (!is_recorded(fd)) return REAL(fdatasync)(fd);
  pthread_mutex_lock(&lock);
  const int result = REAL(fdatasync)(fd);
  if (result == 0) note(kSync, 0, 0, NULL, 0);
  pthread_mutex_unlock(&lock);
  // As long as on a disk, so that other threads come between.
  usleep(1000);
  return result;
}
int fsync(int fd) { return fdatasync(fd); }

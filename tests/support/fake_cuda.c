// A libcuda.so.1 without a GPU: memory is the host's, streams are done at once, kernels only
// report.
//
// With `fake_run_kernels`, modules are shared libraries for the CPU device, and launches run their
// kernels, as late as `fake_delay` says. Then streams do all their work in order, and each is apart
// from the others, as on a GPU.
//
// It exists to check how we call the driver: arguments, packing, and what each failure becomes. Any
// call can be told to fail (fake_fail), streams to stay busy (fake_busy), and every call is
// counted. Copies on a stream that waits for a word, or for another stream, are made once it goes
// on.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
enum { kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotFound = 500, kNotReady = 600 };
enum {
  kCallsMax = 128,
  kFunctionsMax = 1024,
  kWaitsMax = 65536,
  kMemoriesMax = 1024,
  kWorkMax = 65536,
  kEventMagic = 0xE0E0
};

static struct {
  const char* name;
  int count;
  CUresult fail;
} calls[kCallsMax];

static int busy;
static _Thread_local int context_depth;
static _Atomic int live_allocations;
static CUresult fault;

static void end_all_works(void);

static pthread_mutex_t calls_lock = PTHREAD_MUTEX_INITIALIZER;
static int call_index(const char* name) {
  pthread_mutex_lock(&calls_lock);
  for (int i = 0; i < kCallsMax; ++i) {
    if (calls[i].name == NULL) calls[i].name = strdup(name);
    if (strcmp(calls[i].name, name) == 0) {
      pthread_mutex_unlock(&calls_lock);
      return i;
    }
  }
  abort();
}

// What tests set and read.
void fake_fail(const char* name, CUresult code) { calls[call_index(name)].fail = code; }
int fake_count(const char* name) { return calls[call_index(name)].count; }
void fake_busy(int on) { busy = on; }
// A kernel has faulted: from now on every call in the context fails.
void fake_fault(CUresult code) { fault = code; }
int fake_context_depth(void) { return context_depth; }
int fake_live_allocations(void) { return live_allocations; }

// Counts the call and fails it if told to.
#define ENTER                                                 \
  do {                                                        \
    int entered = call_index(__func__);                       \
    ++calls[entered].count;                                   \
    if (calls[entered].fail != 0) return calls[entered].fail; \
  } while (0)

// Like ENTER, and the call needs a current context, as the real one does.
#define ENTER_CONTEXT                   \
  do {                                  \
    ENTER;                              \
    if (context_depth == 0) return 201; \
    if (fault != 0) return fault;       \
  } while (0)

CUresult cuInit(unsigned flags) {
  ENTER;
  return flags == 0 ? kSuccess : kInvalidValue;
}
CUresult cuDriverGetVersion(int* version) {
  ENTER;
  *version = 13000;
  return kSuccess;
}
CUresult cuGetErrorName(CUresult code, const char** name) {
  switch (code) {
    case kOutOfMemory:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return kSuccess;
    case kInvalidValue:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return kSuccess;
    case 200:
      *name = "CUDA_ERROR_INVALID_IMAGE";
      return kSuccess;
    case 201:
      *name = "CUDA_ERROR_INVALID_CONTEXT";
      return kSuccess;
    case kNotFound:
      *name = "CUDA_ERROR_NOT_FOUND";
      return kSuccess;
    case 700:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return kSuccess;
    case 719:
      *name = "CUDA_ERROR_LAUNCH_FAILED";
      return kSuccess;
    case 800:
      *name = "CUDA_ERROR_NOT_PERMITTED";
      return kSuccess;
    case 801:
      *name = "CUDA_ERROR_NOT_SUPPORTED";
      return kSuccess;
    default:
      *name = NULL;
      return kInvalidValue;
  }
}
CUresult cuGetErrorString(CUresult code, const char** text) {
  (void)code;
  *text = "what the driver says";
  return kSuccess;
}

// NVRTC looks for this in any libcuda.so.1 that it finds, and does without it.
CUresult cuGetExportTable(const void** exported, const void* id) {
  (void)id;
  *exported = NULL;
  return kNotFound;
}

// How many GPUs there are, all with the same memory, and whether they reach each other's: 2 means
// without atomics.
static int device_count = 1;
static int devices_reach = 1;
void fake_devices(int count, int reach) {
  device_count = count;
  devices_reach = reach;
}
CUresult cuDeviceCanAccessPeer(int* can, int device, int peer) {
  ENTER;
  *can = device != peer && devices_reach;
  return kSuccess;
}
CUresult cuDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  ENTER;
  if (attribute != 3 || device == peer) return kInvalidValue;
  *value = devices_reach == 1;
  return kSuccess;
}
CUresult cuDeviceGetCount(int* count) {
  ENTER;
  *count = device_count;
  return kSuccess;
}
CUresult cuDeviceGet(int* device, int ordinal) {
  ENTER;
  *device = ordinal;
  return kSuccess;
}
CUresult cuDeviceGetName(char* name, int length, int device) {
  ENTER;
  (void)device;
  snprintf(name, (size_t)length, "Fake GPU");
  return kSuccess;
}
CUresult cuDeviceGetUuid(char* uuid, int device) {
  ENTER;
  memset(uuid, 0x40 + device, 16);
  return kSuccess;
}
// What the GPU registers: nothing, writable memory only, and how much at a time.
static int registers = 1;
static int registers_read_only = 1;
static size_t registration_most = (size_t)-1;
void fake_registers(int any, int read_only, size_t most) {
  registers = any;
  registers_read_only = read_only;
  registration_most = most;
}
// What the GPU has for drives.
static int exports_dma_buf = 1;
static int writes_ordering = 100;
void fake_for_drives(int exports, int ordering) {
  exports_dma_buf = exports;
  writes_ordering = ordering;
}
CUresult cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER;
  (void)device;
  switch (attribute) {
    case 16:
      *value = 132;
      break;  // MULTIPROCESSOR_COUNT
    case 41:
      *value = 1;
      break;  // UNIFIED_ADDRESSING
    case 75:
      *value = 9;
      break;  // COMPUTE_CAPABILITY_MAJOR
    case 76:
      *value = 0;
      break;  // COMPUTE_CAPABILITY_MINOR
    case 99:
      *value = registers;
      break;  // HOST_REGISTER_SUPPORTED
    case 113:
      *value = registers_read_only;
      break;  // READ_ONLY_HOST_REGISTER_SUPPORTED
    case 118:
      *value = writes_ordering;
      break;  // GPU_DIRECT_RDMA_WRITES_ORDERING
    case 124:
      *value = exports_dma_buf;
      break;  // DMA_BUF_SUPPORTED
    default:
      return kInvalidValue;
  }
  return kSuccess;
}
CUresult cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER;
  (void)device;
  *context = (void*)0xC0DE;
  return kSuccess;
}
CUresult cuDevicePrimaryCtxRelease(int device) {
  ENTER;
  (void)device;
  return kSuccess;
}
// The context of another GPU, whose streams cannot be created here, and which is never current for
// long.
static void* const other_context = (void*)0x07E6;
static int in_other;
CUresult cuCtxPushCurrent(void* context) {
  ENTER;
  if (context != (void*)0xC0DE && context != other_context) return 201;
  in_other = context == other_context;
  ++context_depth;
  return kSuccess;
}
CUresult cuCtxGetDevice(int* device) {
  ENTER;
  *device = in_other;
  return kSuccess;
}
CUresult cuCtxPopCurrent(void** context) {
  ENTER;
  if (context_depth == 0) return 201;
  --context_depth;
  in_other = 0;
  *context = (void*)0xC0DE;
  return kSuccess;
}

CUresult cuCtxGetCurrent(void** context) {
  ENTER;
  *context = context_depth > 0 ? (void*)0xC0DE : NULL;
  return kSuccess;
}
// The mode of the only thread that tests look at: global at first.
static int capture_mode;
int fake_capture_mode(void) { return capture_mode; }
CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER;
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return kSuccess;
}

CUresult cuMemGetInfo(size_t* available, size_t* total) {
  ENTER_CONTEXT;
  *available = 1u << 30;
  *total = 1ull << 37;
  return kSuccess;
}
// What lies where: 1 is pinned memory of the host, 2 the GPU's.
static struct {
  uint64_t address;
  size_t nbytes;
  int kind;
} memories[kMemoriesMax];
static pthread_mutex_t memories_lock = PTHREAD_MUTEX_INITIALIZER;
static void note_memory(uint64_t address, size_t nbytes, int kind) {
  pthread_mutex_lock(&memories_lock);
  for (int i = 0; i < kMemoriesMax; ++i) {
    if (kind != 0 ? memories[i].kind != 0 : memories[i].address != address) continue;
    memories[i].address = address;
    memories[i].nbytes = nbytes;
    memories[i].kind = kind;
    break;
  }
  pthread_mutex_unlock(&memories_lock);
}
CUresult cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  ENTER_CONTEXT;
  if (attribute != 2) return kInvalidValue;  // MEMORY_TYPE
  for (int i = 0; i < kMemoriesMax; ++i) {
    if (memories[i].kind == 0 || address < memories[i].address ||
        address - memories[i].address >= memories[i].nbytes)
      continue;
    *(int*)value = memories[i].kind;
    return kSuccess;
  }
  return kInvalidValue;
}
// Whether bytes that begin in memory of the driver's end there: a copy across two registrations is
// one of memory that the driver does not know.
static int in_one_memory(uint64_t address, size_t nbytes) {
  for (int i = 0; i < kMemoriesMax; ++i) {
    if (memories[i].kind == 0 || address < memories[i].address ||
        address - memories[i].address >= memories[i].nbytes)
      continue;
    return address - memories[i].address + nbytes <= memories[i].nbytes;
  }
  return 1;
}
// A dma-buf is an anonymous file of its own: nobody reads the memory by it.
CUresult cuMemGetHandleForAddressRange(void* handle, uint64_t address, size_t nbytes, int type,
                                       uint64_t flags) {
  ENTER_CONTEXT;
  if (type != 1 || flags != 0 || address % 4096 != 0 || nbytes % 4096 != 0) return kInvalidValue;
  if (!exports_dma_buf) return 801;
  int kind = 0;
  if (cuPointerGetAttribute(&kind, 2, address) != kSuccess || kind != 2) return kInvalidValue;
  if (!in_one_memory(address, nbytes)) return kInvalidValue;
  const int file = memfd_create("fake dma-buf", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, (off_t)nbytes) != 0) return kOutOfMemory;
  *(int*)handle = file;
  return kSuccess;
}
CUresult cuMemAlloc(uint64_t* address, size_t nbytes) {
  ENTER_CONTEXT;
  *address = (uint64_t)aligned_alloc(256, (nbytes + 255) & ~(size_t)255);
  if (*address == 0) return kOutOfMemory;
  memset((void*)*address, 0xA5, nbytes);
  note_memory(*address, nbytes, 2);
  ++live_allocations;
  return kSuccess;
}
CUresult cuMemFree(uint64_t address) {
  ENTER_CONTEXT;
  end_all_works();
  note_memory(address, 0, 0);
  free((void*)address);
  --live_allocations;
  return kSuccess;
}
// Memory that processes share is an anonymous file, and a handle its descriptor.
struct location {
  int type, id;
};
struct allocation_prop {
  int type, handle_types;
  struct location where;
  void* unused;
  unsigned char flags[8];
};
struct access {
  struct location where;
  int flags;
};
enum { kHandle = 1000, kUnit = 2 << 20 };
static const struct allocation_prop shared_memory = {1, 1, {1, 0}, NULL, {0}};
static int is_shared(const struct allocation_prop* prop) {
  struct allocation_prop found = *prop;
  if (found.where.id < 0 || found.where.id >= device_count) return 0;
  found.where.id = 0;
  return memcmp(&found, &shared_memory, 16) == 0;
}
CUresult cuMemGetAllocationGranularity(size_t* unit, const struct allocation_prop* prop,
                                       int option) {
  ENTER_CONTEXT;
  *unit = kUnit;
  return option == 0 && is_shared(prop) ? kSuccess : kInvalidValue;
}
CUresult cuMemCreate(uint64_t* handle, size_t size, const struct allocation_prop* prop,
                     uint64_t flags) {
  ENTER_CONTEXT;
  if (flags != 0 || size % kUnit != 0 || !is_shared(prop))
    return kInvalidValue;
  const int file = memfd_create("fake GPU", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, (off_t)size) != 0) return kOutOfMemory;
  *handle = (uint64_t)file + kHandle;
  ++live_allocations;
  return kSuccess;
}
CUresult cuMemRelease(uint64_t handle) {
  ENTER_CONTEXT;
  --live_allocations;
  return close((int)(handle - kHandle)) == 0 ? kSuccess : kInvalidValue;
}
CUresult cuMemExportToShareableHandle(void* exported, uint64_t handle, int type, uint64_t flags) {
  ENTER_CONTEXT;
  if (type != 1 || flags != 0) return kInvalidValue;
  *(int*)exported = dup((int)(handle - kHandle));
  return kSuccess;
}
CUresult cuMemImportFromShareableHandle(uint64_t* handle, void* exported, int type) {
  ENTER_CONTEXT;
  const int file = dup((int)(intptr_t)exported);
  if (type != 1 || file < 0) return kInvalidValue;
  *handle = (uint64_t)file + kHandle;
  ++live_allocations;
  return kSuccess;
}
CUresult cuMemAddressReserve(uint64_t* address, size_t size, size_t alignment, uint64_t at,
                             uint64_t flags) {
  ENTER_CONTEXT;
  if (alignment != 0 || at != 0 || flags != 0 || size % kUnit != 0) return kInvalidValue;
  void* place = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) return kOutOfMemory;
  *address = (uint64_t)place;
  ++live_allocations;
  return kSuccess;
}
CUresult cuMemAddressFree(uint64_t address, size_t size) {
  ENTER_CONTEXT;
  --live_allocations;
  return munmap((void*)address, size) == 0 ? kSuccess : kInvalidValue;
}
CUresult cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
  ENTER_CONTEXT;
  const int file = (int)(handle - kHandle);
  struct stat status;
  if (offset != 0 || flags != 0 || fstat(file, &status) != 0 || (size_t)status.st_size != size)
    return kInvalidValue;
  void* place = mmap((void*)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0);
  if (place == MAP_FAILED) return kInvalidValue;
  note_memory(address, size, 2);
  ++live_allocations;
  return kSuccess;
}
CUresult cuMemUnmap(uint64_t address, size_t size) {
  ENTER_CONTEXT;
  note_memory(address, 0, 0);
  --live_allocations;
  void* place =
      mmap((void*)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return place != MAP_FAILED ? kSuccess : kInvalidValue;
}
static int maps_read_only = 1;
void fake_maps_read_only(int on) { maps_read_only = on; }
CUresult cuMemSetAccess(uint64_t address, size_t size, const struct access* access, size_t count) {
  ENTER_CONTEXT;
  if (count == 0) return kInvalidValue;
  for (size_t i = 0; i < count; i++) {
    const struct location where = access[i].where;
    if (where.type != 1 || where.id < 0 || where.id >= device_count) return kInvalidValue;
  }
  if (access->flags != 3 && !maps_read_only) return 801;
  const int rights = access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
  return mprotect((void*)address, size, rights) == 0 ? kSuccess : kInvalidValue;
}
CUresult cuMemHostAlloc(void** pointer, size_t nbytes, unsigned flags) {
  ENTER_CONTEXT;
  if (flags != 3) return kInvalidValue;  // PORTABLE | DEVICEMAP
  *pointer = aligned_alloc(4096, (nbytes + 4095) & ~(size_t)4095);
  if (*pointer == NULL) return kOutOfMemory;
  memset(*pointer, 0xA5, nbytes);
  note_memory((uint64_t)*pointer, nbytes, 1);
  ++live_allocations;
  return kSuccess;
}
CUresult cuMemFreeHost(void* pointer) {
  ENTER_CONTEXT;
  end_all_works();
  note_memory((uint64_t)pointer, 0, 0);
  free(pointer);
  --live_allocations;
  return kSuccess;
}
CUresult cuMemHostGetDevicePointer(uint64_t* address, void* pointer, unsigned flags) {
  ENTER_CONTEXT;
  if (flags != 0) return kInvalidValue;
  *address = (uint64_t)pointer;
  return kSuccess;
}
static unsigned registered_flags;
unsigned fake_registered_flags(void) { return registered_flags; }
CUresult cuMemHostRegister(void* pointer, size_t nbytes, unsigned flags) {
  ENTER_CONTEXT;
  if (pointer == NULL || nbytes == 0) return kInvalidValue;
  if (!registers) return 801;
  if (nbytes > registration_most) return kInvalidValue;
  registered_flags = flags;
  note_memory((uint64_t)pointer, nbytes, 1);
  ++live_allocations;
  return kSuccess;
}
CUresult cuMemHostUnregister(void* pointer) {
  ENTER_CONTEXT;
  end_all_works();
  note_memory((uint64_t)pointer, 0, 0);
  --live_allocations;
  return kSuccess;
}

// Streams are 0x10057, 0x10157, 0x10257, ... in the order of their making, and 1, the legacy default.
static intptr_t streams;
static intptr_t held_stream;
// A stream of the other GPU.
static intptr_t foreign_stream;
void fake_foreign(intptr_t stream) { foreign_stream = stream; }
static CUresult check_stream(void* stream) {
  const intptr_t handle = (intptr_t)stream;
  const int made = handle % 256 == 0x57 && handle / 256 - 256 < streams;
  return made || handle == 0 || handle == 1 ? kSuccess : 400;
}
CUresult cuStreamGetCtx(void* stream, void** context) {
  ENTER;
  const int foreign = foreign_stream == (intptr_t)stream;
  *context = foreign ? other_context : (void*)0xC0DE;
  return foreign ? kSuccess : check_stream(stream);
}
static intptr_t pending_stream;
static int is_busy(const void* stream) {
  const intptr_t one = (intptr_t)stream;
  return busy || (one != 0 && (held_stream == one || pending_stream == one));
}
// Another stream that stays busy; 0: none does.
void fake_pend(intptr_t stream) { pending_stream = stream; }
// One stream alone stays busy; 0: none does.
void fake_hold(intptr_t stream) { held_stream = stream; }

// How often one stream was made to wait for an event of another.
static struct {
  const void* waiting;
  const void* awaited;
  int count;
} waits[kWaitsMax];
static pthread_mutex_t waits_lock = PTHREAD_MUTEX_INITIALIZER;
static int wait_index(const void* waiting, const void* awaited) {
  int i = 0;
  while (waits[i].count != 0 && (waits[i].waiting != waiting || waits[i].awaited != awaited)) ++i;
  if (i + 1 == kWaitsMax) abort();
  return i;
}
int fake_waits(intptr_t waiting, intptr_t awaited) {
  return waits[wait_index((void*)waiting, (void*)awaited)].count;
}
static void count_wait(const void* waiting, const void* awaited) {
  pthread_mutex_lock(&waits_lock);
  const int i = wait_index(waiting, awaited);
  waits[i].waiting = waiting;
  waits[i].awaited = awaited;
  ++waits[i].count;
  pthread_mutex_unlock(&waits_lock);
}
// Kernels of programs for the CPU device: mirrors of entry.cuh and base/platform.cuh.
struct entry_param {
  uint32_t bytes, element_bytes;
};
struct thread_context {
  uint32_t index, count;
  void* serving[2];
  uint32_t yields;
  void *finding[2], *taken;
};
struct entry {
  const char* name;
  void (*run)(const void* const* arguments, const struct thread_context* here);
  const struct entry_param* params;
  uint32_t param_count, context_bytes;
};
struct entry_table {
  const struct entry* entries;
  uint32_t count;
};
static int runs_kernels;
void fake_run_kernels(void) { runs_kernels = 1; }

// Work that streams have not done, in the order in which it was queued. Unless kernels run,
// launches, fills of words and waits for words of 32 bits are not among it.
enum work_kind { kCopy, kWaitWord, kWriteWord, kWaitStream, kWaitWord32, kFillWords, kKernel };
struct work {
  const void* stream;  // null: done
  enum work_kind kind;
  uint64_t target, source;  // of a copy; the word, and its value; a kernel's entry, and parameters
  size_t nbytes;
  const void* awaited;  // its work that was queued before `awaited_end`
  uint64_t awaited_end;
  int begun;
  uint64_t not_before;  // nanoseconds; see fake_delay
};
static struct work works[kWorkMax];
static uint64_t work_first, work_count;  // numbers of works; before the first all is done
static pthread_mutex_t works_lock = PTHREAD_MUTEX_INITIALIZER;
static struct work* work_at(uint64_t number) { return &works[number % kWorkMax]; }
// Work begins up to so much later than it could.
static uint64_t delay_ns, delay_state = 1;
void fake_delay(unsigned microseconds_max, uint64_t seed) {
  delay_ns = 1000ull * microseconds_max;
  delay_state = seed * 2 + 1;
}
static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
// Three quarters of all work are not late.
static uint64_t begins_at(void) {
  if (delay_ns == 0) return 0;
  delay_state = delay_state * 6364136223846793005ull + 1442695040888963407ull;
  if ((delay_state >> 62) != 0) return 0;
  return now_ns() + (delay_state >> 33) % delay_ns;
}
// The stream of work that is done. 0 is a stream, too.
static void* const kDone = (void*)-1;

// Whether a stream has work left of what was queued before `end`.
static int has_work(const void* stream, uint64_t end) {
  for (uint64_t i = work_first; i < end; ++i)
    if (work_at(i)->stream == stream) return 1;
  return 0;
}
// The same without waits for streams that a check keeps busy, by which no other becomes busy here.
static int is_late(const void* stream, uint64_t end) {
  for (uint64_t i = work_first; i < end; ++i) {
    const struct work* work = work_at(i);
    if (work->stream == stream && !(work->kind == kWaitStream && is_busy(work->awaited))) return 1;
  }
  return 0;
}
static int can_do(const struct work* work) {
  if (work->not_before != 0 && now_ns() < work->not_before) return 0;
  if (work->kind == kWaitWord) return __atomic_load_n((uint64_t*)work->target, 2) >= work->source;
  if (work->kind == kWaitWord32)
    return (int32_t)(__atomic_load_n((uint32_t*)work->target, 2) - (uint32_t)work->source) >= 0;
  if (work->kind == kWaitStream)
    return !is_busy(work->awaited) && !has_work(work->awaited, work->awaited_end);
  return 1;
}
// A kernel runs as one warp, which does the work of all.
static void run_kernel(const struct work* work) {
  const struct entry* kernel = (const struct entry*)work->target;
  const struct thread_context here = {.count = 1};
  const void* arguments[16];
  const char* at = (char*)work->source;
  for (uint32_t i = 0; i < kernel->param_count; at += kernel->params[i++].bytes) arguments[i] = at;
  kernel->run(arguments, &here);
  free((void*)work->source);
}
static void do_work(struct work* work) {
  if (work->kind == kCopy) memcpy((void*)work->target, (void*)work->source, work->nbytes);
  if (work->kind == kWriteWord) __atomic_store_n((uint64_t*)work->target, work->source, 3);
  if (work->kind == kFillWords)
    for (size_t i = 0; i < work->nbytes; ++i) ((uint32_t*)work->target)[i] = (uint32_t)work->source;
  if (work->kind != kKernel) return;
  // Kernels of other streams run meanwhile. The stream's next work sees that this is not done.
  work->begun = 1;
  pthread_mutex_unlock(&works_lock);
  run_kernel(work);
  pthread_mutex_lock(&works_lock);
}
// Returns whether there is work left. Kernels run in threads of their own: a caller may hold what a
// kernel waits for, such as the interpreter.
static int do_works(int kernels) {
  pthread_mutex_lock(&works_lock);
  while (work_first < work_count && work_at(work_first)->stream == kDone) ++work_first;
  for (uint64_t i = work_first; i < work_count; ++i) {
    struct work* work = work_at(i);
    if (work->stream == kDone || work->begun || has_work(work->stream, i) || !can_do(work)) continue;
    if (work->kind == kKernel && !kernels) continue;
    do_work(work);
    work->stream = kDone;
    // Others may wait for it.
    while (work_first < work_count && work_at(work_first)->stream == kDone) ++work_first;
    i = work_first - 1;
  }
  const int left = work_first < work_count;
  pthread_mutex_unlock(&works_lock);
  return left;
}
// What was captured, in order: a replay does it on the stream of the capture.
static int is_captured(const void* stream);
static struct work kept[64];
static int kept_count;
static void queue_work(struct work work) {
  if (is_captured(work.stream)) {
    if (work.kind == kKernel || work.kind == kCopy || work.kind == kFillWords) {
      if (kept_count == sizeof kept / sizeof kept[0]) abort();
      kept[kept_count++] = work;
    }
    return;
  }
  pthread_mutex_lock(&works_lock);
  while (work_count - work_first == kWorkMax) {
    pthread_mutex_unlock(&works_lock);
    do_works(0);
    pthread_mutex_lock(&works_lock);
  }
  work.not_before = begins_at();
  *work_at(work_count++) = work;
  pthread_mutex_unlock(&works_lock);
  do_works(0);
}
static void* go_on(void* unused) {
  prctl(PR_SET_TIMERSLACK, 1000);
  for (;; usleep(20)) do_works(1);
  return unused;
}
// Streams go on by themselves from now on, as those of a GPU do: otherwise only in calls.
int fake_run_streams(void) {
  pthread_t thread;
  return pthread_create(&thread, NULL, go_on, NULL) || pthread_detach(thread);
}
// As memory is freed on a GPU, only once all is done that may use it.
static void end_all_works(void) {
  if (!runs_kernels) return;
  const uint64_t end = work_count;
  while (do_works(0) && work_first < end) usleep(20);
}
CUresult cuCtxSynchronize(void) {
  ENTER_CONTEXT;
  end_all_works();
  return kSuccess;
}
CUresult cuMemcpyAsync(uint64_t target, uint64_t source, size_t nbytes, void* stream) {
  ENTER_CONTEXT;
  if (!in_one_memory(target, nbytes) || !in_one_memory(source, nbytes)) return kInvalidValue;
  queue_work((struct work){stream, kCopy, target, source, nbytes, NULL, 0, 0, 0});
  return check_stream(stream);
}
struct copy_attributes {
  int source_order, source_hint[2], target_hint[2];
  unsigned flags;
};
CUresult cuMemcpyBatchAsync(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count,
                            struct copy_attributes* attributes, size_t* starts,
                            size_t attribute_count, size_t* failed, void* stream) {
  ENTER_CONTEXT;
  if (count == 0 || attribute_count != 1 || starts[0] != 0 || attributes->source_order != 1 ||
      attributes->flags != 0 || failed == NULL)
    return kInvalidValue;
  for (size_t i = 0; i < count; ++i)
    queue_work((struct work){stream, kCopy, targets[i], sources[i], sizes[i], NULL, 0, 0, 0});
  return check_stream(stream);
}
CUresult cuStreamWaitValue64(void* stream, uint64_t address, uint64_t value, unsigned flags) {
  ENTER_CONTEXT;
  if (flags != 0) return kInvalidValue;  // GEQ
  queue_work((struct work){stream, kWaitWord, address, value, 0, NULL, 0, 0, 0});
  return check_stream(stream);
}
CUresult cuStreamWriteValue64(void* stream, uint64_t address, uint64_t value, unsigned flags) {
  ENTER_CONTEXT;
  if (flags != 0) return kInvalidValue;
  queue_work((struct work){stream, kWriteWord, address, value, 0, NULL, 0, 0, 0});
  return check_stream(stream);
}
// Copies of pageable memory and fills come behind the work of their stream.
static void end_works(const void* stream) {
  for (int tries = 0; tries < 1000000; ++tries) {
    do_works(0);
    pthread_mutex_lock(&works_lock);
    const int late = is_late(stream, work_count);
    pthread_mutex_unlock(&works_lock);
    if (!late) return;
    usleep(20);
  }
  abort();
}
CUresult cuMemcpyHtoDAsync(uint64_t target, const void* source, size_t nbytes, void* stream) {
  ENTER_CONTEXT;
  end_works(stream);
  memcpy((void*)target, source, nbytes);
  return check_stream(stream);
}
CUresult cuMemcpyDtoHAsync(void* target, uint64_t source, size_t nbytes, void* stream) {
  ENTER_CONTEXT;
  end_works(stream);
  memcpy(target, (void*)source, nbytes);
  return check_stream(stream);
}
CUresult cuMemsetD8Async(uint64_t address, unsigned char byte, size_t nbytes, void* stream) {
  ENTER_CONTEXT;
  end_works(stream);
  memset((void*)address, byte, nbytes);
  return check_stream(stream);
}

CUresult cuStreamCreate(void** stream, unsigned flags) {
  ENTER_CONTEXT;
  if (flags != 1) return kInvalidValue;  // NON_BLOCKING
  *stream = (void*)(0x10057 + 256 * (intptr_t)streams++);
  return kSuccess;
}
CUresult cuStreamDestroy(void* stream) {
  ENTER_CONTEXT;
  return check_stream(stream);
}
// Captures: one stream at a time. Asking a captured stream whether it is done ends the capture.
// Other streams take part once they have waited for an event of it, and must be joined at its end.
enum { kCaptureActive = 1, kCaptureInvalidated = 2, kHostNodesMax = 64, kForksMax = 8 };
static struct {
  intptr_t stream;
  int status;
  uint64_t id;
  struct {
    intptr_t stream;
    int joined;
  } forks[kForksMax];
  int fork_count;
} capture;
static int fork_of(const void* stream) {
  for (int i = 0; i < capture.fork_count; ++i)
    if (capture.forks[i].stream == (intptr_t)stream) return i;
  return -1;
}
typedef void (*host_function)(void*);
struct user_object {
  host_function destroy;
  void* argument;
};
static struct {
  host_function call;
  void* argument;
} host_nodes[kHostNodesMax];
static int host_node_count;
static struct user_object* retained[kHostNodesMax];
static int retained_count;
void fake_capture_begin(intptr_t stream) {
  capture.stream = stream;
  capture.status = kCaptureActive;
  capture.fork_count = 0;
  ++capture.id;
}
// Whether the capture was still valid.
int fake_capture_end(void) {
  int valid = capture.status == kCaptureActive;
  for (int i = 0; i < capture.fork_count; ++i) valid &= capture.forks[i].joined;
  capture.status = capture.fork_count = 0;
  return valid;
}
int fake_host_nodes(void) { return host_node_count; }
// What a replay does: the host nodes, and what was captured, if kernels run.
void fake_replay(void) {
  for (int i = 0; i < host_node_count; ++i) host_nodes[i].call(host_nodes[i].argument);
  for (int i = 0; i < kept_count; ++i) {
    struct work work = kept[i];
    work.stream = (void*)capture.stream;
    if (work.kind == kKernel) {
      void* copy = malloc(work.nbytes);
      work.source = (uint64_t)memcpy(copy, (void*)work.source, work.nbytes);
    }
    queue_work(work);
  }
}
void fake_destroy_graphs(void) {
  for (int i = 0; i < retained_count; ++i) {
    retained[i]->destroy(retained[i]->argument);
    free(retained[i]);
  }
  while (kept_count > 0)
    if (kept[--kept_count].kind == kKernel) free((void*)kept[kept_count].source);
  retained_count = host_node_count = 0;
}
// What was queued, in order: the functions that were launched, and waits for values.
static char queued[1 << 14];
const char* fake_queued(void) { return queued; }
void fake_forget_queued(void) { queued[0] = 0; }
static void note_queued(const char* what, const void* stream) {
  const size_t used = strlen(queued);
  snprintf(queued + used, sizeof queued - used, "%s %#lx\n", what, (unsigned long)stream);
}
// The words that captured streams wait for, and the last one that any stream waits for.
static const uint32_t* last_word;
static int value_nodes;
const uint32_t* fake_last_word(void) { return last_word; }
int fake_value_nodes(void) { return value_nodes; }
static int is_captured(const void* stream) {
  return capture.status == kCaptureActive &&
         (capture.stream == (intptr_t)stream || fork_of(stream) >= 0);
}
CUresult cuStreamGetId(void* stream, unsigned long long* id) {
  ENTER_CONTEXT;
  if (is_captured(stream)) {
    capture.status = kCaptureInvalidated;
    return 900;  // STREAM_CAPTURE_UNSUPPORTED
  }
  *id = (unsigned long long)(intptr_t)stream;  // no handle comes again
  return check_stream(stream);
}
CUresult cuStreamGetCaptureInfo(void* stream, int* status, uint64_t* id, void** graph,
                                void*** dependencies, size_t* count) {
  ENTER_CONTEXT;
  *status = capture.stream == (intptr_t)stream || fork_of(stream) >= 0 ? capture.status : 0;
  if (id != NULL) *id = capture.id;
  if (graph != NULL) *graph = (void*)0x96A9;
  if (dependencies != NULL) *dependencies = NULL;
  if (count != NULL) *count = 0;
  return kSuccess;
}
CUresult cuGraphAddHostNode(void** node, void* graph, void** dependencies, size_t count,
                            const void* params) {
  ENTER_CONTEXT;
  (void)dependencies;
  if (graph != (void*)0x96A9 || count != 0 || host_node_count == kHostNodesMax)
    return kInvalidValue;
  memcpy(&host_nodes[host_node_count++], params, sizeof host_nodes[0]);
  *node = (void*)0x90DE;
  return kSuccess;
}
CUresult cuUserObjectCreate(struct user_object** object, void* argument, host_function destroy,
                            unsigned references, unsigned flags) {
  ENTER_CONTEXT;
  if (references != 1 || flags != 1) return kInvalidValue;  // NO_DESTRUCTOR_SYNC
  *object = malloc(sizeof **object);
  if (*object == NULL) return kOutOfMemory;
  (*object)->destroy = destroy;
  (*object)->argument = argument;
  return kSuccess;
}
CUresult cuGraphRetainUserObject(void* graph, struct user_object* object, unsigned count,
                                 unsigned flags) {
  ENTER_CONTEXT;
  if (graph != (void*)0x96A9 || count != 1 || flags != 1 || retained_count == kHostNodesMax)
    return kInvalidValue;  // MOVE
  retained[retained_count++] = object;
  return kSuccess;
}
CUresult cuUserObjectRelease(struct user_object* object, unsigned count) {
  ENTER_CONTEXT;
  if (count != 1) return kInvalidValue;
  object->destroy(object->argument);
  free(object);
  return kSuccess;
}
CUresult cuMemsetD32Async(uint64_t address, unsigned word, size_t count, void* stream) {
  ENTER_CONTEXT;
  if (runs_kernels) {
    queue_work((struct work){stream, kFillWords, address, word, count, NULL, 0, 0, 0});
    return check_stream(stream);
  }
  for (size_t i = 0; i < count; ++i) ((unsigned*)address)[i] = word;
  return check_stream(stream);
}
CUresult cuStreamWaitValue32(void* stream, uint64_t address, uint32_t value, unsigned flags) {
  ENTER_CONTEXT;
  if (address == 0 || address % 4 != 0 || flags != 0) return kInvalidValue;  // GEQ
  last_word = (const uint32_t*)address;
  value_nodes += is_captured(stream);
  note_queued(value == 1 ? "wait for 1" : "wait for another value", stream);
  if (runs_kernels)
    queue_work((struct work){stream, kWaitWord32, address, value, 0, NULL, 0, 0, 0});
  return check_stream(stream);
}
CUresult cuStreamQuery(void* stream) {
  ENTER_CONTEXT;
  if (is_captured(stream)) capture.status = kCaptureInvalidated;
  do_works(0);
  if (is_late(stream, work_count)) return kNotReady;
  return is_busy(stream) ? kNotReady : check_stream(stream);
}

struct event {
  int magic;  // kEventMagic while it exists
  void* stream;
  uint64_t work_end;  // the stream's work before the record was queued before this
  uint64_t capture;   // in which it was recorded; 0: in none
};
static int is_event(const struct event* event) {
  return event != NULL && event->magic == kEventMagic;
}
CUresult cuStreamWaitEvent(void* stream, struct event* event, unsigned flags) {
  ENTER_CONTEXT;
  if (!is_event(event) || flags != 0) return kInvalidValue;
  if (event->capture != 0) {
    if (capture.status != kCaptureActive || event->capture != capture.id) return 907;
    const int waiting = fork_of(stream), awaited = fork_of(event->stream);
    if (awaited >= 0) capture.forks[awaited].joined = 1;
    if (waiting >= 0) capture.forks[waiting].joined = 0;
    if (waiting < 0 && (intptr_t)stream != capture.stream) {
      if (capture.fork_count == kForksMax) abort();
      capture.forks[capture.fork_count].stream = (intptr_t)stream;
      capture.forks[capture.fork_count++].joined = 0;
    }
    return check_stream(stream);
  }
  if (is_captured(stream)) {
    capture.status = kCaptureInvalidated;
    return 905;  // the event is not of the capture
  }
  count_wait(stream, event->stream);
  if (event->stream != NULL && event->stream != stream)
    queue_work((struct work){stream, kWaitStream, 0, 0, 0, event->stream, event->work_end, 0, 0});
  return check_stream(stream);
}
CUresult cuEventCreate(struct event** event, unsigned flags) {
  ENTER_CONTEXT;
  if (flags != 0 && flags != 2) return kInvalidValue;  // DEFAULT or DISABLE_TIMING
  *event = calloc(1, sizeof **event);
  if (*event == NULL) return kOutOfMemory;
  (*event)->magic = kEventMagic;
  ++live_allocations;
  return kSuccess;
}
CUresult cuEventDestroy(struct event* event) {
  ENTER_CONTEXT;
  if (!is_event(event)) return kInvalidValue;
  event->magic = 0;
  free(event);
  --live_allocations;
  return kSuccess;
}
// How long a call to record an event takes.
static unsigned record_us;
void fake_record_slowly(unsigned microseconds) { record_us = microseconds; }
CUresult cuEventRecord(struct event* event, void* stream) {
  ENTER_CONTEXT;
  if (!is_event(event)) return kInvalidValue;
  pthread_mutex_lock(&works_lock);
  event->stream = stream;
  event->work_end = work_count;
  pthread_mutex_unlock(&works_lock);
  event->capture = is_captured(stream) ? capture.id : 0;
  if (record_us != 0) usleep(record_us);
  return check_stream(stream);
}
CUresult cuEventQuery(struct event* event) {
  ENTER_CONTEXT;
  if (!is_event(event)) return kInvalidValue;
  if (event->capture != 0) return 907;  // CAPTURED_EVENT
  do_works(0);
  if (is_late(event->stream, event->work_end)) return kNotReady;
  return is_busy(event->stream) ? kNotReady : kSuccess;
}
CUresult cuEventElapsedTime(float* milliseconds, struct event* start, struct event* end) {
  ENTER_CONTEXT;
  if (!is_event(start) || !is_event(end)) return kInvalidValue;
  *milliseconds = 1.5f;
  return kSuccess;
}

static const char* functions[kFunctionsMax];
static const struct entry* entries[kFunctionsMax];
// The kernels of a shared library, as bytes. It stays loaded.
static const struct entry_table* load_library(const char* image) {
  uint64_t headers;
  uint16_t each, count;
  memcpy(&headers, image + 0x28, sizeof headers);  // which a linker writes last
  memcpy(&each, image + 0x3A, sizeof each);
  memcpy(&count, image + 0x3C, sizeof count);
  const size_t nbytes = headers + (size_t)each * count;
  const int file = memfd_create("fake module", MFD_CLOEXEC);
  if (file < 0 || write(file, image, nbytes) != (ssize_t)nbytes) abort();
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return library == NULL ? NULL : (const struct entry_table*)dlsym(library, "fw_entries");
}
CUresult cuModuleLoadData(void** module, const void* image) {
  ENTER_CONTEXT;
  if (memcmp(image, "\177ELF", 4) != 0) return 200;
  *module = (void*)0x30D;
  if (runs_kernels) {
    const struct entry_table* loaded = load_library(image);
    if (loaded == NULL) return 200;
    *module = (void*)loaded;
  }
  ++live_allocations;
  return kSuccess;
}
CUresult cuModuleUnload(void* module) {
  ENTER_CONTEXT;
  --live_allocations;
  return module == (void*)0x30D || runs_kernels ? kSuccess : kInvalidValue;
}
static const struct entry* entry_of(const struct entry_table* module, const char* name) {
  // The built-in kernels of the CPU device have plain names.
  char* plain = NULL;
  const unsigned long length = strncmp(name, "_Z", 2) == 0 ? strtoul(name + 2, &plain, 10) : 0;
  for (uint32_t i = 0; i < module->count; ++i) {
    const char* own = module->entries[i].name;
    if (strcmp(own, name) == 0) return &module->entries[i];
    if (length != 0 && strlen(own) == length && strncmp(own, plain, length) == 0)
      return &module->entries[i];
  }
  return NULL;
}
CUresult cuModuleGetFunction(void** function, void* module, const char* name) {
  ENTER_CONTEXT;
  if (module != (void*)0x30D && !runs_kernels) return kInvalidValue;
  const struct entry* found = runs_kernels ? entry_of(module, name) : NULL;
  if (runs_kernels && (found == NULL || found->context_bytes != sizeof(struct thread_context)))
    return kNotFound;
  for (int i = 0; i < kFunctionsMax; ++i) {
    if (functions[i] == NULL) {
      functions[i] = strdup(name);
      entries[i] = found;
    }
    if (strcmp(functions[i], name) == 0 && entries[i] == found) {
      *function = (void*)(intptr_t)(0xF000 + i);
      return kSuccess;
    }
  }
  return kNotFound;
}
CUresult cuFuncLoad(void* function) {
  ENTER_CONTEXT;
  return (intptr_t)function >= 0xF000 ? kSuccess : kInvalidValue;
}
CUresult cuFuncGetAttribute(int* value, int attribute, void* function) {
  ENTER_CONTEXT;
  if ((intptr_t)function < 0xF000) return kInvalidValue;
  *value = 100 + attribute;
  return kSuccess;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int block_threads,
                                                     size_t shared_bytes) {
  ENTER_CONTEXT;
  if ((intptr_t)function < 0xF000 || shared_bytes != 0) return kInvalidValue;
  *blocks = block_threads > 1024 ? 0 : 2048 / block_threads;
  return kSuccess;
}

// A launch leaves its geometry at the address that is its struct's first member, and behind it the
// struct's next eight bytes.
CUresult cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        void* stream, void** params, void** extra) {
  ENTER_CONTEXT;
  if ((intptr_t)function < 0xF000 || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 ||
      shared_bytes != 0 || extra != NULL)
    return kInvalidValue;
  if (stream != NULL && (intptr_t)stream == foreign_stream) return 400;
  note_queued(functions[(intptr_t)function - 0xF000], stream);
  if (runs_kernels) {
    const struct entry* kernel = entries[(intptr_t)function - 0xF000];
    size_t nbytes = 1;
    for (uint32_t i = 0; i < kernel->param_count; ++i) nbytes += kernel->params[i].bytes;
    char *copy = malloc(nbytes), *at = copy;
    for (uint32_t i = 0; i < kernel->param_count; at += kernel->params[i++].bytes)
      memcpy(at, params[i], kernel->params[i].bytes);
    queue_work(
        (struct work){stream, kKernel, (uint64_t)kernel, (uint64_t)copy, nbytes, NULL, 0, 0, 0});
    return check_stream(stream);
  }
  if (params == NULL) return check_stream(stream);
  uint64_t* report = *(uint64_t**)params[0];
  if (report == NULL) return check_stream(stream);  // a lookup in several tables
  report[0] = grid_x;
  report[1] = block_x;
  report[2] = (uint64_t)stream;
  memcpy(report + 3, (char*)params[0] + 8, 8);
  return check_stream(stream);
}

// Only the calls above exist; the binding reports any other as missing.
#define CALL(name) {#name, (void*)name}
static const struct {
  const char* name;
  void* address;
} table[] = {
    CALL(cuInit),
    CALL(cuDriverGetVersion),
    CALL(cuGetErrorName),
    CALL(cuGetErrorString),
    CALL(cuDeviceGetCount),
    CALL(cuDeviceCanAccessPeer),
    CALL(cuDeviceGetP2PAttribute),
    CALL(cuDeviceGet),
    CALL(cuDeviceGetName),
    CALL(cuDeviceGetAttribute),
    CALL(cuDevicePrimaryCtxRetain),
    CALL(cuDevicePrimaryCtxRelease),
    CALL(cuCtxPushCurrent),
    CALL(cuCtxPopCurrent),
    CALL(cuCtxGetCurrent),
    CALL(cuCtxGetDevice),
    CALL(cuCtxSynchronize),
    CALL(cuStreamGetCtx),
    CALL(cuThreadExchangeStreamCaptureMode),
    CALL(cuStreamGetCaptureInfo),
    CALL(cuGraphAddHostNode),
    CALL(cuUserObjectCreate),
    CALL(cuGraphRetainUserObject),
    CALL(cuUserObjectRelease),
    CALL(cuMemsetD32Async),
    CALL(cuMemGetInfo),
    CALL(cuMemAlloc),
    CALL(cuMemFree),
    CALL(cuMemHostAlloc),
    CALL(cuMemFreeHost),
    CALL(cuMemHostGetDevicePointer),
    CALL(cuMemHostRegister),
    CALL(cuMemHostUnregister),
    CALL(cuMemcpyAsync),
    CALL(cuMemcpyBatchAsync),
    CALL(cuPointerGetAttribute),
    CALL(cuStreamWaitValue64),
    CALL(cuStreamWriteValue64),
    CALL(cuMemcpyHtoDAsync),
    CALL(cuMemcpyDtoHAsync),
    CALL(cuMemsetD8Async),
    CALL(cuStreamCreate),
    CALL(cuStreamDestroy),
    CALL(cuStreamGetId),
    CALL(cuStreamQuery),
    CALL(cuStreamWaitEvent),
    CALL(cuStreamWaitValue32),
    CALL(cuEventCreate),
    CALL(cuEventDestroy),
    CALL(cuEventRecord),
    CALL(cuEventQuery),
    CALL(cuEventElapsedTime),
    CALL(cuModuleLoadData),
    CALL(cuModuleUnload),
    CALL(cuModuleGetFunction),
    CALL(cuFuncLoad),
    CALL(cuFuncGetAttribute),
    CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor),
    CALL(cuLaunchKernel),
    CALL(cuDeviceGetUuid),
    CALL(cuMemGetAllocationGranularity),
    CALL(cuMemCreate),
    CALL(cuMemRelease),
    CALL(cuMemExportToShareableHandle),
    CALL(cuMemImportFromShareableHandle),
    CALL(cuMemAddressReserve),
    CALL(cuMemAddressFree),
    CALL(cuMemMap),
    CALL(cuMemUnmap),
    CALL(cuMemSetAccess),
    CALL(cuMemGetHandleForAddressRange),
};

// A driver older than CUDA 12.8.
static int no_batches;
void fake_without_batches(void) { no_batches = 1; }
CUresult cuGetProcAddress_v2(const char* name, void** address, int version, uint64_t flags,
                             void* status) {
  (void)flags, (void)status;
  // Older cuda-bindings look this function up by itself.
  *address = strcmp(name, "cuGetProcAddress") == 0 ? (void*)cuGetProcAddress_v2 : NULL;
  for (size_t i = 0; i < sizeof table / sizeof table[0]; ++i)
    if (strcmp(table[i].name, name) == 0) *address = table[i].address;
  if (strcmp(name, "cuMemcpyBatchAsync") == 0 && (version < 12080 || no_batches)) *address = NULL;
  return *address != NULL ? kSuccess : kNotFound;
}

#include "cuda/context.h"

#include <dlfcn.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/order.h"

namespace fw::native::cuda {

namespace {

// CUstreamCaptureMode and CUstreamCaptureStatus.
constexpr int kRelaxed = 2;
constexpr int kActive = 1;
// Flags of cuUserObjectCreate and cuGraphRetainUserObject.
constexpr unsigned kNoDestructorSync = 1;
constexpr unsigned kMove = 1;
// The interfaces are those of CUDA 12.0, the oldest driver that is served.
constexpr int kInterfaceVersion = 12000;
constexpr unsigned kNoTimes = 2;  // CU_EVENT_DISABLE_TIMING

// `wait_any`: most calls that are waited for so end soon, and a pause takes 50 us more than asked.
constexpr std::chrono::microseconds kAskedWithoutPause{20};
constexpr std::chrono::microseconds kPause{20};

// CU_STREAM_PER_THREAD; below it, 0 and CU_STREAM_LEGACY.
constexpr uintptr_t kLastDefaultStream = 2;

// The driver that brought batches of copies.
constexpr int kBatchVersion = 12080;
// A copy in a batch reads its source in the order of the stream.
constexpr int kInStreamOrder = 1;
constexpr int kMemoryType = 2;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr Result kInvalidValue = 1;
constexpr Result kNotSupported = 801;
constexpr unsigned kGreaterOrEqual = 0;

}  // namespace

// CUmemcpyAttributes.
struct CopyAttributes {
  int source_order;
  struct {
    int type;
    int id;
  } source_hint, target_hint;
  unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24);

// CUDA_HOST_NODE_PARAMS.
struct HostNode {
  void (*call)(void*);
  void* argument;
};

struct Driver {
  Result (*ctx_get_current)(Handle* context);
  Result (*ctx_push)(Handle context);
  Result (*ctx_pop)(Handle* context);
  Result (*exchange_capture_mode)(int* mode);
  Result (*launch_kernel)(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, Handle stream, void** params, void** extra);
  Result (*stream_query)(Handle stream);
  Result (*stream_wait_event)(Handle stream, Handle event, unsigned flags);
  Result (*event_record)(Handle event, Handle stream);
  Result (*event_query)(Handle event);
  Result (*event_create)(Handle* event, unsigned flags);
  Result (*event_destroy)(Handle event);
  Result (*stream_number)(Handle stream, unsigned long long* number);
  Result (*memset_words)(uint64_t address, unsigned word, size_t count, Handle stream);
  Result (*capture_info)(Handle stream, int* status, uint64_t* id, Handle* graph,
                         const Handle** dependencies, size_t* count);
  Result (*add_host_node)(Handle* node, Handle graph, const Handle* dependencies, size_t count,
                          const HostNode* params);
  Result (*create_user_object)(Handle* object, void* argument, void (*destroy)(void*),
                               unsigned references, unsigned flags);
  Result (*retain_user_object)(Handle graph, Handle object, unsigned count, unsigned flags);
  Result (*release_user_object)(Handle object, unsigned count);
  Result (*memcpy_async)(uint64_t target, uint64_t source, size_t nbytes, Handle stream);
  // Null before CUDA 12.8.
  Result (*memcpy_batch)(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count,
                         CopyAttributes* attributes, size_t* attribute_starts,
                         size_t attribute_count, size_t* failed, Handle stream);
  Result (*pointer_attribute)(void* value, int attribute, uint64_t address);
  Result (*wait_value64)(Handle stream, uint64_t address, uint64_t value, unsigned flags);
  Result (*write_value64)(Handle stream, uint64_t address, uint64_t value, unsigned flags);
  // The driver refused a batch once: it is not asked again.
  mutable std::atomic<bool> batch_refused{false};

  Driver();
};

Driver::Driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) throw std::runtime_error(dlerror());
  using Find = Result (*)(const char*, void**, int, uint64_t, void*);
  const auto find = reinterpret_cast<Find>(dlsym(library, "cuGetProcAddress_v2"));
  if (find == nullptr) {
    throw std::runtime_error("the driver is older than CUDA 12.0: it has no cuGetProcAddress_v2");
  }
  const auto bind = [find](auto& call, const char* name) {
    void* address = nullptr;
    if (find(name, &address, kInterfaceVersion, 0, nullptr) != kSuccess) address = nullptr;
    call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(address);
    if (call == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
  };
  bind(ctx_get_current, "cuCtxGetCurrent");
  bind(ctx_push, "cuCtxPushCurrent");
  bind(ctx_pop, "cuCtxPopCurrent");
  bind(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  bind(launch_kernel, "cuLaunchKernel");
  bind(stream_query, "cuStreamQuery");
  bind(stream_wait_event, "cuStreamWaitEvent");
  bind(event_record, "cuEventRecord");
  bind(event_query, "cuEventQuery");
  bind(event_create, "cuEventCreate");
  bind(event_destroy, "cuEventDestroy");
  bind(stream_number, "cuStreamGetId");
  bind(memset_words, "cuMemsetD32Async");
  bind(capture_info, "cuStreamGetCaptureInfo");
  bind(add_host_node, "cuGraphAddHostNode");
  bind(create_user_object, "cuUserObjectCreate");
  bind(retain_user_object, "cuGraphRetainUserObject");
  bind(release_user_object, "cuUserObjectRelease");
  bind(memcpy_async, "cuMemcpyAsync");
  bind(pointer_attribute, "cuPointerGetAttribute");
  bind(wait_value64, "cuStreamWaitValue64");
  bind(write_value64, "cuStreamWriteValue64");
  void* batch = nullptr;
  if (find("cuMemcpyBatchAsync", &batch, kBatchVersion, 0, nullptr) != kSuccess) batch = nullptr;
  memcpy_batch = reinterpret_cast<decltype(memcpy_batch)>(batch);
}

namespace {

const Driver& driver() {
  static const Driver found;
  return found;
}

// The capture modes that `enter` has replaced in this thread.
thread_local std::vector<int> modes;

}  // namespace

// Makes a context current in this thread, unless it is already.
class Context::Current {
 public:
  explicit Current(const Context& context) : driver_(context.driver_) {
    if (context.fork_.in_child()) {
      result_ = kForked;
      return;
    }
    Handle now = nullptr;
    result_ = driver_.ctx_get_current(&now);
    if (result_ != kSuccess || now == context.context_) return;
    result_ = driver_.ctx_push(context.context_);
    pushed_ = result_ == kSuccess;
  }
  ~Current() {
    Handle popped;
    if (pushed_) driver_.ctx_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  Result result() const { return result_; }
  template <typename Act>
  Result then(Act act) const {
    return result_ == kSuccess ? act() : result_;
  }

 private:
  const Driver& driver_;
  Result result_ = kSuccess;
  bool pushed_ = false;
};

namespace {

// Lets this thread ask about streams while another stream is being captured.
class Relaxed {
 public:
  explicit Relaxed(const Driver& driver) : driver_(driver) {
    driver_.exchange_capture_mode(&mode_);
  }
  ~Relaxed() { driver_.exchange_capture_mode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  const Driver& driver_;
  int mode_ = kRelaxed;
};

}  // namespace

Context::Context(Handle context) : driver_(driver()), context_(context) {}

void Context::set_own(Handle stream) { own_ = stream; }

void Context::note_own(bool always) const {
  if (always) own_shared_ = true;
  ++own_uses_;
}

// Counts work after it was queued: who does not see it yet is not behind it either.
void Context::used(Handle stream) const {
  if (stream == own_) ++own_uses_;
}

Result Context::enter() const {
  if (fork_.in_child()) return kForked;
  const Result result = driver_.ctx_push(context_);
  if (result != kSuccess) return result;
  int mode = kRelaxed;
  driver_.exchange_capture_mode(&mode);
  modes.push_back(mode);
  return kSuccess;
}

void Context::exit() const {
  Handle popped;
  ++own_uses_;  // what was called may have used it
  if (modes.empty()) return;
  driver_.exchange_capture_mode(&modes.back());
  modes.pop_back();
  driver_.ctx_pop(&popped);
}

Result Context::within(const std::function<Result()>& act) const {
  return Current(*this).then(act);
}

Result Context::launch(Handle function, uint32_t blocks, uint32_t block_threads, void** params,
                       Handle stream) const {
  return Current(*this).then([&] {
    const Result result = driver_.launch_kernel(function, blocks, 1, 1, block_threads, 1, 1, 0,
                                                stream, params, nullptr);
    used(stream);
    return result;
  });
}

Result Context::order(Handle before, Handle after, Handle event) const {
  return Current(*this).then([&] { return order_now(before, after, event); });
}

// Whether a query proves that the stream has nothing to wait for; `result` is what failed.
bool Context::idle(Handle stream, Result& result) const {
  result = kSuccess;
  const uint64_t uses = own_uses_;
  if (stream == own_ && !own_shared_ && uses == own_done_) return true;
  // An event on a default stream also covers other streams, which a query does not ask.
  if (reinterpret_cast<uintptr_t>(stream) <= kLastDefaultStream) return false;
  result = driver_.stream_query(stream);
  if (result == kSuccess && stream == own_) own_done_ = uses;
  if (result != kNotReady) return true;
  result = kSuccess;
  return false;
}

// kCaptured, kSuccess if it is not, or what failed.
Result Context::is_captured(Handle stream) const {
  int status = 0;
  const Result result = driver_.capture_info(stream, &status, nullptr, nullptr, nullptr, nullptr);
  return result == kSuccess && status != 0 ? kCaptured : result;
}

Result Context::order_now(Handle before, Handle after, Handle event) const {
  const Relaxed relaxed(driver_);
  Result result;
  if (idle(before, result)) return result;
  result = is_captured(after);
  return result == kSuccess ? wait_now(before, {&after, 1}, event) : result;
}

Result Context::wait_now(Handle before, std::span<const Handle> after, Handle event) const {
  const std::lock_guard<std::mutex> lock(ordering_);
  Result result = driver_.event_record(event, before);
  for (const Handle each : after) {
    if (result != kSuccess || each == before) continue;
    result = driver_.stream_wait_event(each, event, 0);
    used(each);
  }
  return result;
}

Result Context::launch_among(std::span<const Handle> others, bool both_ways, Handle event,
                             Handle function, uint32_t blocks, uint32_t block_threads,
                             void** params, Handle stream, std::span<const Accessed> arrays) const {
  return Current(*this).then([&] {
    Result result = is_captured(stream);
    if (result != kSuccess) return result;
    for (const Handle other : others) {
      if (other != own_ && (result = is_captured(other)) != kSuccess) return result;
    }
    const Relaxed relaxed(driver_);
    for (const Handle other : others) {
      // An event takes less time than a query whether it is needed.
      const bool follows = other != stream && (other != own_ || !idle(other, result));
      if (follows) result = wait_now(other, {&stream, 1}, event);
      if (result != kSuccess) return result;
    }
    result = launch_ordered(function, blocks, block_threads, params, stream, arrays);
    if (result != kSuccess || !both_ways || others.empty()) return result;
    return wait_now(stream, others, event);
  });
}

// Each array's order begins and ends around those of the arrays behind it.
Result Context::launch_ordered(Handle function, uint32_t blocks, uint32_t block_threads,
                               void** params, Handle stream,
                               std::span<const Accessed> arrays) const {
  if (arrays.empty()) {
    const Result result = driver_.launch_kernel(function, blocks, 1, 1, block_threads, 1, 1, 0,
                                                stream, params, nullptr);
    used(stream);
    return result;
  }
  const Accessed& first = arrays.front();
  Order::Access access;
  Result result =
      first.order ? first.order->begin(stream, first.stores, {}, access, true) : kSuccess;
  if (result != kSuccess) return result;
  result = launch_ordered(function, blocks, block_threads, params, stream, arrays.subspan(1));
  const Result ended = first.order ? first.order->end(stream, access) : kSuccess;
  return result != kSuccess ? result : ended;
}

Result Context::record(Handle event, Handle stream) const {
  return Current(*this).then([&] { return driver_.event_record(event, stream); });
}

Result Context::done(Handle stream) const {
  return Current(*this).then([&] {
    const Relaxed relaxed(driver_);
    return driver_.stream_query(stream);
  });
}

Result Context::event_done(Handle event) const {
  return Current(*this).then([&] {
    const Relaxed relaxed(driver_);
    return driver_.event_query(event);
  });
}

Result Context::create_event(Handle& event) const {
  return Current(*this).then([&] { return driver_.event_create(&event, kNoTimes); });
}

void Context::destroy_event(Handle event) const {
  Current(*this).then([&] { return driver_.event_destroy(event); });
}

Result Context::wait_event(Handle stream, Handle event) const {
  return Current(*this).then([&] {
    const Result result = driver_.stream_wait_event(stream, event, 0);
    used(stream);
    return result;
  });
}

Result Context::number(Handle stream, uint64_t& found) const {
  unsigned long long number = 0;
  const Result result = Current(*this).then([&] { return driver_.stream_number(stream, &number); });
  found = number;
  return result;
}

Result Context::poll(Handle stream, int64_t microseconds) const {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::microseconds(microseconds);
  return Current(*this).then([&] {
    const Relaxed relaxed(driver_);
    Result result = driver_.stream_query(stream);
    while (result == kNotReady && Clock::now() < end) result = driver_.stream_query(stream);
    return result;
  });
}

Result Context::wait_any(const std::vector<Handle>& events, int64_t microseconds) const {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  return Current(*this).then([&] {
    const Relaxed relaxed(driver_);
    while (true) {
      for (const Handle event : events) {
        const Result result = driver_.event_query(event);
        if (result != kNotReady) return result;
      }
      const auto waited = Clock::now() - begin;
      if (waited >= std::chrono::microseconds(microseconds)) return kNotReady;
      if (waited >= kAskedWithoutPause) std::this_thread::sleep_for(kPause);
    }
  });
}

Result Context::fill(uint64_t address, uint32_t word, size_t count, Handle stream) const {
  return Current(*this).then([&] {
    const Result result = driver_.memset_words(address, word, count, stream);
    used(stream);
    return result;
  });
}

// Copies.

Result Context::copy_pieces(const std::vector<Piece>& pieces, Handle stream) const {
  if (pieces.size() > 1 && copies_batches()) {
    std::vector<uint64_t> targets, sources;
    std::vector<size_t> sizes;
    for (const Piece& each : pieces) {
      targets.push_back(each.target);
      sources.push_back(each.source);
      sizes.push_back(each.nbytes);
    }
    CopyAttributes attributes = {kInStreamOrder, {0, 0}, {0, 0}, 0};
    size_t start = 0, failed = SIZE_MAX;
    const Result result =
        driver_.memcpy_batch(targets.data(), sources.data(), sizes.data(), sizes.size(),
                             &attributes, &start, 1, &failed, stream);
    if (result != kNotSupported) return result;
    // Relaxed: another thread's batch may be refused as well.
    driver_.batch_refused.store(true, std::memory_order_relaxed);
  }
  Result result = kSuccess;
  for (const Piece& each : pieces) {
    if (result == kSuccess) {
      result = driver_.memcpy_async(each.target, each.source, each.nbytes, stream);
    }
  }
  return result;
}

Result Context::copy(const std::vector<Handle>& others, Handle event,
                     const std::vector<Piece>& pieces, Handle begin, Handle end, Handle stream,
                     bool& recorded) const {
  recorded = false;
  return Current(*this).then([&] {
    Result result = kSuccess;
    for (const Handle other : others) {
      // A copy after work that is being captured would be drawn into the graph.
      if ((result = is_captured(other)) != kSuccess) return result;
    }
    const Relaxed relaxed(driver_);
    for (const Handle other : others) {
      if (other != stream && !idle(other, result)) result = wait_now(other, {&stream, 1}, event);
      if (result != kSuccess) return result;
    }
    if (begin != nullptr) result = driver_.event_record(begin, stream);
    if (result == kSuccess) result = copy_pieces(pieces, stream);
    used(stream);
    // Of a single piece that was refused, nothing is under way.
    const bool queued = result == kSuccess || pieces.size() > 1;
    if (end == nullptr || !queued) return result;
    const Result marked = driver_.event_record(end, stream);
    recorded = marked == kSuccess;
    return result != kSuccess ? result : marked;
  });
}

bool Context::copies_batches() const {
  return driver_.memcpy_batch != nullptr && !driver_.batch_refused.load(std::memory_order_relaxed);
}

Result Context::memory(uint64_t address, Memory& kind) const {
  int found = 0;
  const Result result =
      Current(*this).then([&] { return driver_.pointer_attribute(&found, kMemoryType, address); });
  // The driver does not know the address.
  kind = result == kSuccess ? Memory(found) : Memory::kUnknown;
  return result == kInvalidValue ? kSuccess : result;
}

Result Context::wait_word(uint64_t address, uint64_t value, Handle stream) const {
  const Result result = Current(*this).then(
      [&] { return driver_.wait_value64(stream, address, value, kGreaterOrEqual); });
  used(stream);
  return result;
}

Result Context::write_word(uint64_t address, uint64_t value, Handle stream) const {
  const Result result =
      Current(*this).then([&] { return driver_.write_value64(stream, address, value, 0); });
  used(stream);
  return result;
}

// Captures.

Capture Context::capture(Handle stream) const {
  Capture found;
  int status = 0;
  found.result = Current(*this).then(
      [&] { return driver_.capture_info(stream, &status, &found.id, nullptr, nullptr, nullptr); });
  found.active = status == kActive;
  return found;
}

Result Context::capture_call(Handle stream, void (*call)(void*), void* argument) const {
  return Current(*this).then([&] {
    int status = 0;
    uint64_t id = 0;
    Handle graph = nullptr, node = nullptr;
    const Handle* dependencies = nullptr;
    size_t count = 0;
    const Result result = driver_.capture_info(stream, &status, &id, &graph, &dependencies, &count);
    if (result != kSuccess) return result;
    const HostNode params = {call, argument};
    return driver_.add_host_node(&node, graph, dependencies, count, &params);
  });
}

Result Context::capture_count(Handle stream, std::shared_ptr<GraphCount> graphs) const {
  return Current(*this).then([&] {
    int status = 0;
    uint64_t id = 0;
    Handle graph = nullptr, object = nullptr;
    Result result = driver_.capture_info(stream, &status, &id, &graph, nullptr, nullptr);
    if (result != kSuccess) return result;
    auto held = std::make_unique<std::shared_ptr<GraphCount>>(std::move(graphs));
    const auto forget = [](void* each) {
      const std::unique_ptr<std::shared_ptr<GraphCount>> ended(
          static_cast<std::shared_ptr<GraphCount>*>(each));
      (*ended)->fetch_sub(1);
    };
    result = driver_.create_user_object(&object, held.get(), forget, 1, kNoDestructorSync);
    if (result != kSuccess) return result;
    // The driver has it now, and calls `forget` whatever follows.
    (*held.release())->fetch_add(1);
    result = driver_.retain_user_object(graph, object, 1, kMove);
    if (result != kSuccess) driver_.release_user_object(object, 1);
    return result;
  });
}

}  // namespace fw::native::cuda

// The scheduler: fibres, strategies that choose the next one, collectives, and time.
//
// It runs one launch at a time: device threads, one fibre for each lane, and host fibres
// (controllers). A fibre runs until it calls a hook (base/simulator/hooks.cuh), where the strategy
// may switch to another. Every decision comes from the seed, so the same seed gives the same
// schedule; `hash` proves it. A launch ends when all threads have ended. A failure ends it by an
// exception in the caller.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "context.h"
#include "explorer.h"
#include "flashwarp/base/platform.cuh"
#include "random.h"

namespace fw::simulator {

// The failure of a schedule, in full.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Strategy : uint8_t {
  kRandom,      // any fibre, at every point, in bursts of a length that the seed chooses
  kPriority,    // PCT: random priorities, and a few points where the running fibre drops to the end
  kRoundRobin,  // each fibre for a fixed number of points
  kRival,       // the fibre that touched the same address last, or the one that waits longest
  kExhaustive,  // every schedule with at most `preemptions` preemptions, one after the other
};
inline constexpr const char* kStrategyNames[] = {"random", "priority", "round-robin", "rival",
                                                 "exhaustive"};

enum class State : uint8_t { kRunnable, kConverging, kAtCollective, kNapping, kFinished };

enum class Event : uint8_t { kLoad, kStore, kModify, kFence, kCollective, kPause, kStart };

// One of the last accesses of a fibre, for reports.
struct Trace {
  Event event;
  const void* address;
  uint64_t value;
  site at;
};

struct Fibre : thread_place {
  static constexpr uint32_t kTraces = 8;

  Context context;
  Stack stack;
  uint32_t id = 0;
  uint32_t warp = 0;  // in warps_; hosts have none
  bool is_host = false;
  State state = State::kFinished;
  uint32_t position = 0;  // in the list of runnable fibres
  int64_t priority = 0;
  uint64_t last_ran = 0;
  // A nap begins when a whole turn of a wait loop has seen no change by another warp.
  uint64_t seen_changes = 0;
  uint64_t seen_own_changes = 0;
  bool read_stale = false;
  // At a collective.
  site waits_at = {};
  uint32_t waits_for = 0;
  uintptr_t converges_at = 0;
  uint64_t result = 0;
  std::string doing;  // the scenario's words for the operation at hand
  Trace traces[kTraces];
  uint32_t trace_count = 0;
};

// How one run is scheduled. All of it comes from the seed, or is asked for.
struct Plan {
  uint64_t seed = 0;
  Strategy strategy = Strategy::kRandom;
  uint64_t steps_max = 16'000'000;  // of one launch: beyond it, nothing will ever finish
  uint32_t preemptions = 2;         // exhaustive
  bool time_passes = false;         // waits may run out of time
  bool traced = false;              // print every event
};

class Scheduler {
 public:
  Scheduler();

  // Starts a run. `explorer` decides in place of random numbers where it is not null.
  void begin(const Plan& plan, Explorer* explorer);

  // Runs `thread` on `threads` fibres, `width` of them a warp, and `host` on `hosts` fibres, which
  // return once `stopping()`. Throws Failure.
  void launch(uint32_t threads, uint32_t width, const std::function<void(uint32_t)>& thread,
              uint32_t hosts, const std::function<void(uint32_t)>& host);

  // Between launches: housekeeping that need not be explored runs each fibre as long as it can.
  void calm(bool on) { calm_ = on; }
  bool is_calm() const { return calm_; }
  // The multiprocessor of the current fibre's warp: some seeds move warps, at any call.
  uint32_t spread_index();
  // Whether waits may run out of time.
  void let_time_pass(bool on) { plan_.time_passes = on; }

  // From inside a fibre.
  // The fibre is about to wait for time only: that is no deadlock, however long other fibres wait.
  void dawdle() { fruitless_ = 0; }
  Fibre* current() { return current_; }
  bool stopping() const { return stopping_; }
  [[noreturn]] void fail(const std::string& what);
  void point(Event event, const void* address);
  void data_point(Event event, const void* address) {
    ++accesses_;
    if (--data_left_ == 0 && !calm_) spend_data_point(event, address);
  }
  void note(Event event, const void* address, uint64_t value, site at) {
    Trace& trace = current_->traces[current_->trace_count++ % Fibre::kTraces];
    trace = {event, address, value, at};
    if (plan_.traced) print_trace(trace);
  }
  void changed() {
    ++changes_;
    if (!current_->is_host) ++warps_[current_->warp].changes;
    if (napping_ != 0) wake_all();
  }
  void pause(uint32_t ns);  // lets other fibres run, because this one has nothing to do now
  void yield();             // lets other fibres run, without waiting for a change

  uint32_t converge(uintptr_t key, site at);
  // Waits for all lanes of `mask`; their values are then in `values()`, by lane, until another
  // lane goes on. `finish` computes each lane's result from them.
  enum class Meeting : uint8_t { kBallot, kMatch, kTake, kSync };
  uint64_t meet(Meeting kind, uint32_t mask, uint64_t value, uint32_t source, site at);

  // One of n possibilities that the schedule leaves open.
  uint32_t choose(uint32_t n) {
    if (n <= 1) return 0;
    return explorer_ != nullptr && !calm_ ? explorer_->choose(n) : random_.below(n);
  }

  uint64_t clock_ns() const { return clock_ns_; }
  uint64_t points() const { return points_; }
  uint64_t accesses() const { return points_ + accesses_; }
  uint64_t steps() const { return accesses_ + points_; }  // since the process began: a time
  uint64_t hash() const { return hash_; }
  const Fibre& fibre(uint32_t id) const { return *fibres_[id]; }
  const Plan& plan() const { return plan_; }
  void fold(uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001B3u; }

 private:
  struct Group {  // lanes at a collective
    Meeting kind;
    uint32_t mask;
    uint32_t arrived;
    site at;
  };
  struct Warp {
    uint32_t first = 0;  // fibre of lane 0
    uint32_t width = 0;
    uint64_t changes = 0;
    // The groups in which a lane waits. A lane of one mask may wait for lanes that synchronise in a
    // part of it first.
    uint32_t group_count = 0;
    Group groups[32];
    uint64_t values[32];
    uint32_t sources[32];
  };

  static void enter(void* fibre);
  void finish(Fibre& fibre);
  void add_runnable(Fibre& fibre);
  void remove_runnable(Fibre& fibre);
  void wake_all();
  void spend_data_point(Event event, const void* address);
  uint32_t draw_data_step();
  Fibre* pick(bool must_leave, const void* address);
  Fibre* pick_rival(bool must_leave, const void* address);
  Fibre* next_in_turn();
  Fibre* highest_priority(const Fibre* except);
  void leave();  // goes on with another fibre; the current one is not runnable or gives way
  void resume(Fibre* next);
  bool release_convergent(Fibre& fibre);
  Group& join_group(Warp& warp, Meeting kind, uint32_t mask, site at);
  void complete(Warp& warp, const Group& group);
  void tick();
  [[noreturn]] void abandon(const std::string& what);
  std::string describe(const Fibre& fibre) const;
  void print_trace(const Trace& trace) const;

  Plan plan_;
  Explorer* explorer_ = nullptr;
  Random random_;
  uint32_t burst_mask_ = 0;
  uint32_t data_step_ = 1;
  uint32_t gather_percent_ = 0;
  Random moves_;  // of warps; a stream of its own, so that it changes no other choice
  uint32_t move_percent_ = 0;
  bool calm_ = false;
  uint32_t quantum_ = 1;

  std::vector<std::unique_ptr<Fibre>> fibres_;
  uint32_t fibre_count_ = 0;
  std::vector<Warp> warps_;
  std::vector<uint32_t> runnable_;
  uint32_t napping_ = 0;
  uint32_t fruitless_ = 0;  // times that all napped and woke in vain
  uint64_t last_digest_ = 0;
  uint32_t live_threads_ = 0;
  uint32_t live_ = 0;
  bool stopping_ = false;
  const std::function<void(uint32_t)>* thread_ = nullptr;
  const std::function<void(uint32_t)>* host_ = nullptr;
  Context main_;
  Fibre* current_ = nullptr;
  std::string failure_;
  bool failed_ = false;

  uint64_t points_ = 0;
  uint64_t accesses_ = 0;
  uint32_t data_left_ = 1;
  uint64_t launch_limit_ = 0;
  uint64_t changes_ = 0;
  uint64_t clock_ns_ = 1;
  uint64_t hash_ = 0;
  uint32_t quantum_left_ = 0;
  uint32_t preemptions_left_ = 0;
  bool reconsider_ = false;  // PCT: a fibre became runnable
  int64_t lowest_priority_ = 0;
  std::vector<uint64_t> drops_;  // PCT: points where the running fibre drops, last first
  uint32_t toucher_[256];        // by place in the arena: the last fibre there, plus one
};

extern Scheduler scheduler;

}  // namespace fw::simulator

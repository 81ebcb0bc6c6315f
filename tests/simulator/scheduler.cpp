#include "scheduler.h"

#include <algorithm>
#include <cstdio>
#include <exception>

#include "memory.h"

namespace fw::simulator {

Scheduler scheduler;

namespace {

thread_place outside;  // of any launch

constexpr uint32_t kFruitlessMax = 500;
constexpr uint32_t kMultiprocessors = 7;

}  // namespace

thread_place* here = &outside;

Scheduler::Scheduler() { std::fill(std::begin(toucher_), std::end(toucher_), 0); }

void Scheduler::begin(const Plan& plan, Explorer* explorer) {
  plan_ = plan;
  explorer_ = explorer;
  random_ = Random(plan.seed, 1);
  // What a strategy leaves open is the seed's as well: how long fibres run undisturbed, how much of
  // a copy goes by at once, how long diverged lanes wait for each other.
  constexpr uint32_t kBursts[] = {0, 0, 1, 3, 7, 31};
  constexpr uint32_t kDataSteps[] = {1, 5, 23, 101};
  constexpr uint32_t kGathers[] = {0, 50, 90, 98};
  burst_mask_ = random_.pick(kBursts);
  data_step_ = random_.pick(kDataSteps);
  gather_percent_ = explorer != nullptr ? 100 : random_.pick(kGathers);
  constexpr uint32_t kMoves[] = {0, 0, 3, 30};
  moves_ = Random(plan.seed, 4);
  move_percent_ = explorer != nullptr ? 0 : moves_.pick(kMoves);
  quantum_ = 1 + random_.below(24);
  quantum_left_ = quantum_;
  preemptions_left_ = plan.preemptions;
  data_left_ = draw_data_step();
  calm_ = false;
  clock_ns_ = 1;
  hash_ = 0xCBF29CE484222325u;
  std::fill(std::begin(toucher_), std::end(toucher_), 0);
}

uint32_t Scheduler::draw_data_step() {
  if (explorer_ != nullptr) return ~0u;
  return data_step_ == 1 ? 1 : 1 + random_.below(2 * data_step_);
}

void Scheduler::launch(uint32_t threads, uint32_t width,
                       const std::function<void(uint32_t)>& thread, uint32_t hosts,
                       const std::function<void(uint32_t)>& host) {
  fibre_count_ = threads + hosts;
  while (fibres_.size() < fibre_count_) fibres_.push_back(std::make_unique<Fibre>());
  warps_.assign(threads / width, Warp());
  runnable_.clear();
  thread_ = &thread;
  host_ = &host;
  live_threads_ = threads;
  live_ = fibre_count_;
  napping_ = 0;
  fruitless_ = 0;
  stopping_ = false;
  failed_ = false;
  changes_ = 0;
  lowest_priority_ = 0;
  launch_limit_ = points_ + plan_.steps_max;
  for (uint32_t id = 0; id < fibre_count_; ++id) {
    Fibre& f = *fibres_[id];
    f.id = id;
    f.is_host = id >= threads;
    f.index = f.is_host ? id - threads : id;
    f.count = f.is_host ? hosts : threads;
    f.warp = f.is_host ? 0 : id / width;
    f.lane = f.is_host ? 0 : id % width;
    f.spread = uint32_t(mix(plan_.seed + (f.is_host ? ~id : f.warp)) % kMultiprocessors);
    f.block_warps = 1;
    f.last_ran = points_;
    f.seen_changes = f.seen_own_changes = 0;
    f.read_stale = false;
    f.trace_count = 0;
    f.doing.clear();
    f.priority = int64_t(random_.next() >> 2);
    prepare(f.context, f.stack, &enter, &f);
    add_runnable(f);
  }
  for (uint32_t w = 0; w < warps_.size(); ++w) {
    warps_[w].first = w * width;
    warps_[w].width = width;
  }
  drops_.clear();
  if (plan_.strategy == Strategy::kPriority) {
    // How long the launch will be is not known: the seed's guess, so that a seed alone says when.
    constexpr uint32_t kLengths[] = {100, 300, 1000, 3000, 10000};
    const uint32_t length = random_.pick(kLengths);
    const uint32_t count = random_.below(4);
    for (uint32_t i = 0; i < count; ++i) drops_.push_back(points_ + random_.below(length));
    std::sort(drops_.rbegin(), drops_.rend());
  }
  memory.begin_launch(fibre_count_);

  current_ = fibres_[runnable_[choose(fibre_count_)]].get();
  here = current_;
  reconsider_ = true;
  switch_context(main_, current_->context);
  current_ = nullptr;
  here = &outside;
  if (failed_) throw Failure(failure_);
}

void Scheduler::enter(void* argument) {
  Fibre& fibre = *static_cast<Fibre*>(argument);
  try {
    (fibre.is_host ? *scheduler.host_ : *scheduler.thread_)(fibre.index);
  } catch (const std::exception& error) {
    scheduler.fail(std::string("an exception left the thread: ") + error.what());
  }
  scheduler.finish(fibre);
}

void Scheduler::finish(Fibre& fibre) {
  if (!fibre.is_host) {
    const Warp& warp = warps_[fibre.warp];
    for (uint32_t g = 0; g < warp.group_count; ++g) {
      if (((warp.groups[g].mask >> fibre.lane) & 1) != 0) {
        fail("divergent collective: a lane ends while others wait for it");
      }
    }
  }
  remove_runnable(fibre);
  fibre.state = State::kFinished;
  fibre.doing.clear();
  --live_;
  if (!fibre.is_host && --live_threads_ == 0) {
    stopping_ = true;
    wake_all();
  }
  if (live_ == 0) switch_context(fibre.context, main_);
  leave();
}

void Scheduler::add_runnable(Fibre& fibre) {
  fibre.state = State::kRunnable;
  fibre.position = uint32_t(runnable_.size());
  runnable_.push_back(fibre.id);
  reconsider_ = true;
}

void Scheduler::remove_runnable(Fibre& fibre) {
  const uint32_t last = runnable_.back();
  runnable_[fibre.position] = last;
  fibres_[last]->position = fibre.position;
  runnable_.pop_back();
}

void Scheduler::wake_all() {
  if (napping_ == 0) return;
  for (uint32_t id = 0; id < fibre_count_; ++id) {
    if (fibres_[id]->state == State::kNapping) add_runnable(*fibres_[id]);
  }
  napping_ = 0;
}

void Scheduler::point(Event event, const void* address) {
  if (++points_ > launch_limit_) abandon("nothing comes to an end (step limit)");
  fold(uint64_t(current_->id) << 48 ^ uint64_t(event) << 40 ^ memory.offset_of(address));
  ++clock_ns_;
  if (calm_) return;
  Fibre* next = runnable_.size() == 1 ? current_ : pick(false, address);
  if (plan_.strategy == Strategy::kRival) {
    toucher_[(memory.offset_of(address) >> 2) % 256] = current_->id + 1;
  }
  if (next != current_) resume(next);
}

void Scheduler::spend_data_point(Event event, const void* address) {
  data_left_ = draw_data_step();
  --accesses_;
  point(event, address);
}

Fibre* Scheduler::pick(bool must_leave, const void* address) {
  const uint32_t count = uint32_t(runnable_.size());
  switch (calm_ ? Strategy::kRoundRobin : plan_.strategy) {
    case Strategy::kRandom:
      if (!must_leave && (random_.next() >> 40 & burst_mask_) != 0) return current_;
      break;
    case Strategy::kPriority:
      if (must_leave) return highest_priority(current_);
      if (!drops_.empty() && points_ >= drops_.back()) {
        drops_.pop_back();
        current_->priority = --lowest_priority_;
        reconsider_ = true;
      }
      if (!reconsider_) return current_;
      reconsider_ = false;
      return highest_priority(nullptr);
    case Strategy::kRoundRobin:
      if (!must_leave && --quantum_left_ != 0) return current_;
      quantum_left_ = quantum_;
      return next_in_turn();
    case Strategy::kRival:
      return pick_rival(must_leave, address);
    case Strategy::kExhaustive: {
      // In a wait loop the next fibre in turn runs: no choice, so that the loops of two waiting
      // fibres end.
      if (must_leave) {
        const bool waits =
            current_->state <= State::kConverging || current_->state == State::kNapping;
        if (waits) return next_in_turn();
        break;
      }
      if (preemptions_left_ == 0) return current_;
      // 0 goes on; the others are a preemption each.
      const uint32_t choice = explorer_->choose(count);
      if (choice == 0) return current_;
      --preemptions_left_;
      const uint32_t slot = choice <= current_->position ? choice - 1 : choice;
      return fibres_[runnable_[slot]].get();
    }
  }
  if (!must_leave || current_->state > State::kConverging) {
    return fibres_[runnable_[choose(count)]].get();
  }
  if (count == 1) return current_;
  const uint32_t choice = choose(count - 1);
  return fibres_[runnable_[choice < current_->position ? choice : choice + 1]].get();
}

Fibre* Scheduler::next_in_turn() {
  for (uint32_t i = 1; i < fibre_count_; ++i) {
    Fibre* f = fibres_[(current_->id + i) % fibre_count_].get();
    if (f->state <= State::kConverging) return f;
  }
  return current_;
}

Fibre* Scheduler::highest_priority(const Fibre* except) {
  Fibre* best = nullptr;
  for (uint32_t id : runnable_) {
    Fibre* f = fibres_[id].get();
    if (f != except && (best == nullptr || f->priority > best->priority)) best = f;
  }
  return best != nullptr ? best : current_;
}

Fibre* Scheduler::pick_rival(bool must_leave, const void* address) {
  const uint32_t rival = toucher_[(memory.offset_of(address) >> 2) % 256];
  const uint64_t dice = random_.next() >> 32;
  if (address != nullptr && rival != 0 && rival - 1 < fibre_count_ && (dice & 3) != 0) {
    Fibre* f = fibres_[rival - 1].get();
    if (f != current_ && f->state <= State::kConverging) return f;
  }
  if (!must_leave && (dice & 0x70) != 0) return current_;
  Fibre* oldest = nullptr;
  for (uint32_t id : runnable_) {
    Fibre* f = fibres_[id].get();
    if (f != current_ && (oldest == nullptr || f->last_ran < oldest->last_ran)) oldest = f;
  }
  return oldest != nullptr ? oldest : current_;
}

// A wait looks at one thing at a time, so all wake and look on, many times, before it is a
// deadlock.
void Scheduler::tick() {
  if (!runnable_.empty()) return;
  if (memory.digest() != last_digest_) fruitless_ = 0;
  last_digest_ = memory.digest();
  const bool in_vain = ++fruitless_ > kFruitlessMax && !plan_.time_passes;
  if (napping_ == 0 || in_vain) abandon("deadlock: everybody waits, and nothing will change");
  clock_ns_ += 1000;
  memory.settle_stores();
  wake_all();
}

void Scheduler::leave() {
  tick();
  resume(pick(true, nullptr));
}

void Scheduler::resume(Fibre* next) {
  while (next->state == State::kConverging) {
    if (release_convergent(*next)) break;
    // Wait until the other lanes of the warp get there.
    Fibre* other = fibres_[runnable_[random_.below(uint32_t(runnable_.size()))]].get();
    next = other;
  }
  if (next == current_) return;
  Fibre* from = current_;
  from->last_ran = points_;
  current_ = next;
  here = next;
  switch_context(from->context, next->context);
}

bool Scheduler::release_convergent(Fibre& fibre) {
  Warp& warp = warps_[fibre.warp];
  bool others_move = false;
  uint32_t mask = 0;
  for (uint32_t lane = 0; lane < warp.width; ++lane) {
    const Fibre& f = *fibres_[warp.first + lane];
    if (f.state == State::kRunnable) others_move = true;
    if (f.state != State::kConverging || f.converges_at != fibre.converges_at) continue;
    if (&f == &fibre || explorer_ != nullptr || !random_.chance(8)) mask |= 1u << lane;
  }
  if (others_move && gather_percent_ != 0 && random_.chance(gather_percent_)) return false;
  for (uint32_t lane = 0; lane < warp.width; ++lane) {
    if (((mask >> lane) & 1) == 0) continue;
    fibres_[warp.first + lane]->result = mask;
    fibres_[warp.first + lane]->state = State::kRunnable;
  }
  return true;
}

uint32_t Scheduler::converge(uintptr_t key, site at) {
  Fibre& f = *current_;
  const Warp& warp = warps_[f.warp];
  point(Event::kCollective, nullptr);
  if (warp.width == 1) return 1;
  f.converges_at = key;
  f.waits_at = at;
  f.state = State::kConverging;
  reconsider_ = true;
  leave();
  return uint32_t(f.result);
}

// The group of lanes that wait with this mask, after a check; or a new one.
Scheduler::Group& Scheduler::join_group(Warp& warp, Meeting kind, uint32_t mask, site at) {
  for (uint32_t g = 0; g < warp.group_count; ++g) {
    Group& group = warp.groups[g];
    if (group.mask != mask) continue;
    if (group.kind != kind || group.at.line != at.line || group.at.file != at.file) {
      fail("divergent collective: lanes of one mask meet at different places, here " +
           std::string(at.file) + ":" + std::to_string(at.line));
    }
    return group;
  }
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const Fibre& other = *fibres_[warp.first + base::lowest_bit(rest)];
    if (other.state == State::kFinished) {
      fail("divergent collective: waits for a lane that has ended");
    }
    if (other.state == State::kAtCollective && ((other.waits_for >> current_->lane) & 1) != 0) {
      fail("divergent collective: lanes wait for each other with different masks");
    }
  }
  warp.groups[warp.group_count] = {kind, mask, 0, at};
  return warp.groups[warp.group_count++];
}

uint64_t Scheduler::meet(Meeting kind, uint32_t mask, uint64_t value, uint32_t source, site at) {
  Fibre& f = *current_;
  Warp& warp = warps_[f.warp];
  if (((mask >> f.lane) & 1) == 0) fail("divergent collective: a lane outside of its own mask");
  if (kind == Meeting::kTake && ((mask >> source) & 1) == 0) {
    fail("a lane takes a value from a lane outside of the mask");
  }
  if (mask == 1u << f.lane) {
    if (kind == Meeting::kTake) return value;
    return kind == Meeting::kMatch || value != 0 ? mask : 0;
  }
  Group& group = join_group(warp, kind, mask, at);
  group.arrived |= 1u << f.lane;
  warp.values[f.lane] = value;
  warp.sources[f.lane] = source;
  f.waits_at = at;
  f.waits_for = mask;
  if (group.arrived == mask) {
    complete(warp, group);
    group = warp.groups[--warp.group_count];
    const uint64_t result = f.result;
    point(Event::kCollective, nullptr);
    return result;
  }
  remove_runnable(f);
  f.state = State::kAtCollective;
  // Wake lanes that nap in a wait loop: this collective needs them.
  for (uint32_t lane = 0; lane < warp.width; ++lane) {
    Fibre& other = *fibres_[warp.first + lane];
    if (((mask >> lane) & 1) != 0 && other.state == State::kNapping) {
      --napping_;
      add_runnable(other);
    }
  }
  leave();
  return f.result;
}

void Scheduler::complete(Warp& warp, const Group& group) {
  uint64_t bits = 0;
  for (uint32_t lane = 0; lane < warp.width; ++lane) {
    if (((group.mask >> lane) & 1) != 0 && warp.values[lane] != 0) bits |= 1u << lane;
  }
  if (group.kind == Meeting::kSync) memory.synchronize(warp.first, group.mask);
  for (uint32_t lane = 0; lane < warp.width; ++lane) {
    if (((group.mask >> lane) & 1) == 0) continue;
    Fibre& f = *fibres_[warp.first + lane];
    switch (group.kind) {
      case Meeting::kBallot:
        f.result = bits;
        break;
      case Meeting::kMatch:
        f.result = 0;
        for (uint32_t other = 0; other < warp.width; ++other) {
          const bool same = warp.values[other] == warp.values[lane];
          if (((group.mask >> other) & 1) != 0 && same) f.result |= 1u << other;
        }
        break;
      case Meeting::kTake:
        f.result = warp.values[warp.sources[lane]];
        break;
      case Meeting::kSync:
        f.result = 0;
        break;
    }
    if (&f != current_) add_runnable(f);
  }
}

uint32_t Scheduler::spread_index() {
  if (!calm_ && !current_->is_host && moves_.chance(move_percent_)) {
    const Warp& warp = warps_[current_->warp];
    const uint32_t to = moves_.below(kMultiprocessors);
    for (uint32_t lane = 0; lane < warp.width; ++lane) fibres_[warp.first + lane]->spread = to;
  }
  return current_->spread;
}

void Scheduler::pause(uint32_t ns) {
  Fibre& f = *current_;
  clock_ns_ += ns;
  if (++points_ > launch_limit_) abandon("nothing comes to an end (step limit)");
  fold(uint64_t(f.id) << 48 ^ uint64_t(Event::kPause) << 40);
  const uint64_t own = f.is_host ? 0 : warps_[f.warp].changes;
  const bool others_moved = changes_ - f.seen_changes != own - f.seen_own_changes;
  if (!others_moved && !f.read_stale && !stopping_) {
    remove_runnable(f);
    f.state = State::kNapping;
    ++napping_;
  }
  f.read_stale = false;
  if (plan_.strategy == Strategy::kPriority) f.priority = --lowest_priority_;
  leave();
  f.seen_changes = changes_;
  f.seen_own_changes = f.is_host ? 0 : warps_[f.warp].changes;
}

void Scheduler::yield() {
  if (++points_ > launch_limit_) abandon("nothing comes to an end (step limit)");
  fold(uint64_t(current_->id) << 48 ^ uint64_t(Event::kPause) << 40);
  ++clock_ns_;
  if (plan_.strategy == Strategy::kPriority) current_->priority = --lowest_priority_;
  leave();
}

void Scheduler::fail(const std::string& what) {
  if (current_ == nullptr) throw Failure(what);
  abandon(what);
}

void Scheduler::abandon(const std::string& what) {
  failed_ = true;
  failure_ = what + "\n";
  if (current_ != nullptr) failure_ += "  met by " + describe(*current_);
  for (uint32_t id = 0; id < fibre_count_; ++id) {
    const Fibre& f = *fibres_[id];
    if (&f != current_ && f.state != State::kFinished) failure_ += "  " + describe(f);
  }
  switch_context(current_->context, main_);
  __builtin_unreachable();
}

namespace {

std::string name_of(site at) {
  const std::string path = at.file == nullptr ? "?" : at.file;
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(at.line);
}

const char* kEventNames[] = {"load", "store", "modify", "fence", "meet", "pause", "start"};

std::string text_of(const Trace& trace) {
  std::string text = kEventNames[size_t(trace.event)];
  if (trace.address != nullptr) text += " " + memory.describe(trace.address, trace.value);
  return text + " (" + name_of(trace.at) + ")";
}

}  // namespace

std::string Scheduler::describe(const Fibre& f) const {
  std::string text = f.is_host
                         ? "controller " + std::to_string(f.index)
                         : "warp " + std::to_string(f.warp) + " lane " + std::to_string(f.lane);
  if (!f.doing.empty()) text += ", doing " + f.doing;
  if (f.state == State::kAtCollective) {
    char mask[16];
    std::snprintf(mask, sizeof(mask), "%#x", f.waits_for);
    text += ", waits at " + name_of(f.waits_at) + " for lanes " + mask;
  } else if (f.state == State::kConverging) {
    text += ", asks who is active at " + name_of(f.waits_at);
  } else if (f.state == State::kNapping) {
    text += ", waits for a change";
  }
  text += "\n";
  const uint32_t count = std::min(f.trace_count, Fibre::kTraces);
  for (uint32_t i = f.trace_count - count; i != f.trace_count; ++i) {
    text += "      " + text_of(f.traces[i % Fibre::kTraces]) + "\n";
  }
  return text;
}

void Scheduler::print_trace(const Trace& trace) const {
  const Fibre& f = *current_;
  std::printf("%8llu %c%u.%u %s\n", (unsigned long long)points_, f.is_host ? 'C' : 'W',
              f.is_host ? f.index : f.warp, f.lane, text_of(trace).c_str());
}

}  // namespace fw::simulator

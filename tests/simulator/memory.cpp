#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "scheduler.h"

namespace fw::simulator {

Memory memory;

namespace {

constexpr uint64_t kRegionAlignment = 128;

uint64_t peek(const void* p, uint32_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, p, bytes);  // little-endian hosts only, as everywhere
  return value;
}

std::string place_of(site at) {
  const std::string path = at.file;
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(at.line);
}

uint64_t low_bits(uint64_t value, uint32_t bytes) {
  return bytes == 8 ? value : value & ((uint64_t(1) << (8 * bytes)) - 1);
}

// `whole` with `bytes` of it, from `begin` on, replaced.
uint64_t merge(uint64_t whole, uint64_t begin, uint64_t value, uint32_t bytes) {
  std::memcpy(reinterpret_cast<char*>(&whole) + begin, &value, bytes);
  return whole;
}

}  // namespace

Memory::Memory() {
  void* memory = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  arena_ = static_cast<char*>(memory);
  cell_index_.resize(kArenaBytes / 4);
  cell_stamp_.resize(kArenaBytes / 4);
  region_index_.resize(kArenaBytes / kRegionAlignment);
}

void Memory::begin(MemoryMode mode, uint64_t seed) {
  weak_ = mode == MemoryMode::kWeak;
  random_ = Random(seed, 2);
  constexpr uint64_t kWindows[] = {50, 300, 2000, 20000};
  constexpr uint32_t kStale[] = {10, 40, 80};
  window_ = random_.pick(kWindows);
  stale_percent_ = random_.pick(kStale);
  std::memset(arena_, 0, used_);
  used_ = 0;
  regions_.clear();
  some_unmapped_ = false;
}

char* Memory::allocate(const Region& region) {
  const uint64_t bytes = (region.bytes + kRegionAlignment - 1) & ~(kRegionAlignment - 1);
  if (bytes > kArenaBytes - used_) throw std::bad_alloc();
  char* base = arena_ + used_;
  for (uint64_t i = used_; i < used_ + bytes; i += kRegionAlignment) {
    region_index_[i / kRegionAlignment] = uint16_t(regions_.size());
  }
  regions_.push_back(region);
  regions_.back().base = base;
  used_ += bytes;
  return base;
}

void Memory::unmap(int volume) {
  some_unmapped_ = true;
  for (Region& region : regions_) region.is_unmapped |= region.volume == volume;
}

void Memory::check_mapped(const void* p, site at) const {
  if (!some_unmapped_ || !contains(p) || !region_of(offset(p)).is_unmapped) return;
  scheduler.fail("an access to freed memory: " + describe(p, 0) + " at " + place_of(at));
}

void Memory::begin_launch(uint32_t fibres) {
  if (!weak_) return;
  fibres_ = fibres;
  clocks_.assign(uint64_t(fibres) * fibres, 0);
  for (uint32_t f = 0; f < fibres; ++f) clock(f)[f] = 1;
  pending_device_.assign(uint64_t(fibres) * fibres, 0);
  pending_system_.assign(uint64_t(fibres) * fibres, 0);
  fence_device_.assign(fibres, kNone);
  fence_system_.assign(fibres, kNone);
  transfer_.assign(fibres, kNone);
  last_received_.assign(fibres, kNone);
  global_.assign(fibres, 0);
  global_system_.assign(fibres, 0);
  snapshots_.assign(fibres, 0);
  tables_.assign(1, 0);
  cells_.clear();
  outside_.clear();
  ++stamp_;
}

std::string Memory::describe(const void* p, uint64_t value) const {
  char text[64];
  if (!contains(p)) {
    std::snprintf(text, sizeof(text), "private memory = %#llx", (unsigned long long)value);
    return text;
  }
  const Region& r = region_of(offset(p));
  const uint64_t at = uint64_t(static_cast<const char*>(p) - r.base);
  std::string name = r.volume < 0 ? r.name : "volume " + std::to_string(r.volume) + " " + r.name;
  if (r.bytes > r.element_bytes) name += "[" + std::to_string(at / r.element_bytes) + "]";
  if (at % r.element_bytes != 0) name += "+" + std::to_string(at % r.element_bytes);
  if (r.describe != nullptr) return name + " = " + r.describe(value);
  std::snprintf(text, sizeof(text), " = %#llx", (unsigned long long)value);
  return name + text;
}

Memory::Cell& Memory::cell_of(uint64_t at, const Region& region, uint64_t& cell_offset) {
  cell_offset = at & ~uint64_t(region.cell_bytes - 1);
  const uint64_t slot = cell_offset / 4;
  if (cell_stamp_[slot] == stamp_) return cells_[cell_index_[slot]];
  cell_stamp_[slot] = stamp_;
  cell_index_[slot] = uint32_t(cells_.size());
  return add_cell(arena_ + cell_offset, region.cell_bytes);
}

Memory::Cell& Memory::outside_cell(const void* p, uint32_t bytes) {
  const auto [entry, is_new] = outside_.try_emplace(p, uint32_t(cells_.size()));
  return is_new ? add_cell(p, bytes) : cells_[entry->second];
}

// As the launch found it: known to all, whose clocks are nowhere below 0.
Memory::Cell& Memory::add_cell(const void* p, uint32_t bytes) {
  cells_.push_back({1, kNone, {}});
  cells_.back().messages[0] = {peek(p, bytes), 0, 0, kNone, kNone, kNone, 0, false, false, {}};
  return cells_.back();
}

uint32_t Memory::make_table(uint32_t count, uint32_t fill) {
  const uint32_t index = uint32_t(tables_.size());
  tables_.resize(tables_.size() + count, fill);
  return index;
}

uint32_t Memory::snapshot(uint32_t fibre) {
  const uint32_t index = uint32_t(snapshots_.size() / fibres_);
  snapshots_.resize(snapshots_.size() + fibres_);
  std::copy_n(clock(fibre), fibres_, &snapshots_[uint64_t(index) * fibres_]);
  // What comes after is not covered.
  ++clock(fibre)[fibre];
  return index;
}

uint32_t Memory::join(uint32_t a, uint32_t b) {
  if (a == kNone || a == b) return b;
  if (b == kNone) return a;
  const uint32_t index = uint32_t(snapshots_.size() / fibres_);
  snapshots_.resize(snapshots_.size() + fibres_);
  for (uint32_t i = 0; i < fibres_; ++i) {
    snapshots_[uint64_t(index) * fibres_ + i] =
        std::max(snapshots_[uint64_t(a) * fibres_ + i], snapshots_[uint64_t(b) * fibres_ + i]);
  }
  return index;
}

void Memory::join_clock(uint32_t* into, uint32_t snapshot) {
  const uint32_t* from = &snapshots_[uint64_t(snapshot) * fibres_];
  for (uint32_t i = 0; i < fibres_; ++i) into[i] = std::max(into[i], from[i]);
}

bool Memory::knows_message(uint32_t fibre, const Message& m) const {
  const uint32_t* mine = clock(fibre);
  if (mine[m.writer] >= m.time) return true;
  if (m.seen == kNone) return false;
  for (uint32_t f = 0; f < fibres_; ++f) {
    if (mine[f] >= tables_[m.seen + f]) return true;
  }
  return false;
}

// The message that a load returns.
uint32_t Memory::visible(uint32_t fibre, Cell& cell) {
  uint32_t oldest = 0;
  while (oldest + 1 < cell.count && !knows_message(fibre, cell.messages[oldest]) &&
         cell.messages[oldest + 1].superseded_at + window_ > scheduler.accesses() &&
         cell.messages[oldest + 1].superseded_at > horizon_) {
    ++oldest;
  }
  if (oldest == 0 || scheduler.is_calm()) return 0;
  if (scheduler.plan().strategy == Strategy::kExhaustive) return scheduler.choose(oldest + 1);
  return random_.chance(stale_percent_) ? random_.below(oldest + 1) : 0;
}

// Fibres that know of this load must not see an older message.
void Memory::see(uint32_t fibre, Cell& cell, uint32_t index) {
  if (index + 1 >= cell.count) return;
  Message& m = cell.messages[index];
  if (m.seen == kNone) {
    const uint32_t table = make_table(fibres_, ~0u);
    m.seen = table;
  }
  uint32_t& first = tables_[m.seen + fibre];
  first = std::min(first, clock(fibre)[fibre]);
}

void Memory::receive(uint32_t fibre, const Message& m, order o, scope s) {
  const bool device = !scheduler.fibre(fibre).is_host;
  const bool from_device = !scheduler.fibre(m.writer).is_host;
  const bool near = device && (from_device || m.transferred);
  uint32_t release = kNone;
  if (near) {
    release = m.release_device;
  } else if (s == scope::kSystem || !device) {
    release = m.release_system;
  }
  if (release == kNone || release == last_received_[fibre]) return;
  if (o == order::kAcquire || o == order::kAcqRel) {
    join_clock(clock(fibre), release);
    last_received_[fibre] = release;
  } else if (o != order::kPlain) {
    auto& pending = near ? pending_device_ : pending_system_;
    join_clock(&pending[uint64_t(fibre) * fibres_], release);
  }
}

void Memory::push(uint32_t fibre, Cell& cell, const Region& region, uint64_t value, order o,
                  scope s, bool continues, site at) {
  const bool device = !scheduler.fibre(fibre).is_host;
  Message m = {};
  m.value = value;
  m.writer = uint16_t(fibre);
  m.plain = o == order::kPlain;
  m.at = at;
  m.time = clock(fibre)[fibre];
  const bool system = s == scope::kSystem || !device;
  if (o == order::kRelease || o == order::kAcqRel) {
    const uint32_t release = snapshot(fibre);
    m.release_device = device ? release : kNone;
    m.release_system = system ? release : kNone;
  } else if (o == order::kRelaxed) {
    m.release_device = fence_device_[fibre];
    m.release_system = system ? fence_system_[fibre] : kNone;
  } else if (!device && region.sharing == Sharing::kRacy) {
    m.transferred = true;
    m.release_device = m.release_system = transfer_[fibre];
  }
  if (continues) {
    m.release_device = join(m.release_device, cell.messages[0].release_device);
    m.release_system = join(m.release_system, cell.messages[0].release_system);
  }
  const uint64_t now = scheduler.accesses();
  // `superseded_at` is of the message itself: the newest is superseded now.
  for (uint32_t i = std::min(cell.count, kMessages - 1); i > 0; --i) {
    cell.messages[i] = cell.messages[i - 1];
  }
  cell.messages[1].superseded_at = now;
  cell.messages[0] = m;
  cell.count = std::min(cell.count + 1, kMessages);
}

// Whether a load and a store of these fibres need no order.
bool Memory::forgiven(const Region& region, uint32_t one, uint32_t other) const {
  return region.forgives_controllers != nullptr && scheduler.fibre(one).is_host &&
         scheduler.fibre(other).is_host && region.forgives_controllers(region.owner);
}

void Memory::check_load(uint32_t fibre, Cell& cell, const Region& region, bool plain, const void* p,
                        site at) {
  const bool checked = region.sharing == Sharing::kChecked;
  if (!checked && !region.keeps_loads) return;
  const Message& newest = cell.messages[0];
  const bool ordered = clock(fibre)[newest.writer] >= newest.time;
  if (checked && !ordered && (plain || newest.plain) && !forgiven(region, fibre, newest.writer)) {
    report_race(p, plain ? "a plain load" : "a load", newest.writer, at, newest.at);
  }
  if (cell.loads == kNone) {
    const uint32_t table = make_table(2 * fibres_, 0);
    cell.loads = table;
  }
  tables_[cell.loads + fibre] = clock(fibre)[fibre];
  if (plain) tables_[cell.loads + fibres_ + fibre] = clock(fibre)[fibre];
}

void Memory::check_store(uint32_t fibre, Cell& cell, const Region& region, bool plain,
                         const void* p, site at) {
  if (region.sharing != Sharing::kChecked) return;
  const Message& newest = cell.messages[0];
  const uint32_t* mine = clock(fibre);
  if (mine[newest.writer] < newest.time && (plain || newest.plain)) {
    report_race(p, plain ? "a plain store" : "a store", newest.writer, at, newest.at);
  }
  if (cell.loads == kNone) return;
  const uint32_t* loads = &tables_[cell.loads + (plain ? 0 : fibres_)];
  for (uint32_t f = 0; f < fibres_; ++f) {
    if (mine[f] < loads[f] && !forgiven(region, fibre, f)) {
      report_race(p, "a store after a load", f, at, {});
    }
  }
}

// Updates real memory, checks the region's invariants, and wakes fibres that wait for a change.
void Memory::write(void* p, uint64_t value, uint32_t bytes) {
  const uint64_t old = peek(p, bytes);
  if (old == low_bits(value, bytes)) return;
  if (contains(p)) {
    const uint64_t at = offset(p);
    const Region& region = region_of(at);
    if (region.check != nullptr) {
      const uint64_t cell = at & ~uint64_t(region.cell_bytes - 1);
      const uint64_t before = peek(arena_ + cell, region.cell_bytes);
      region.check(region.owner, (cell - uint64_t(region.base - arena_)) / region.element_bytes,
                   before, merge(before, at - cell, value, bytes));
    }
    digest_ ^= mix(old ^ mix(at)) ^ mix(low_bits(value, bytes) ^ mix(at));
  }
  std::memcpy(p, &value, bytes);
  scheduler.changed();
}

namespace {

// What lies outside of the arena is private, unless it is accessed as shared things are.
const Region kOutside = {"", nullptr, 0, 8, 8, Sharing::kAtomic, -1, nullptr, nullptr, nullptr};

bool is_private(order o) { return o == order::kPlain; }

}  // namespace

uint64_t Memory::load(const void* p, uint32_t bytes, order o, scope s, site at) {
  check_mapped(p, at);
  const bool inside = contains(p);
  if (!weak_ || (!inside && is_private(o))) return peek(p, bytes);
  const Region& region = inside ? region_of(offset(p)) : kOutside;
  const uint32_t fibre = scheduler.current()->id;
  uint64_t where = inside ? offset(p) : 0;
  uint64_t base = 0;
  Cell& cell = inside ? cell_of(where, region, base) : outside_cell(p, bytes);
  const bool plain = o == order::kPlain;
  check_load(fibre, cell, region, plain, p, at);
  const uint32_t index = plain && region.sharing == Sharing::kChecked ? 0 : visible(fibre, cell);
  see(fibre, cell, index);
  if (plain && region.sharing == Sharing::kRacy) {
    // Pages that a writer outside of the device changes. What copies them stores what it has
    // loaded, so a fence behind the copy is behind these loads, as behind relaxed ones.
    receive(fibre, cell.messages[index], order::kRelaxed, scope::kSystem);
  } else {
    receive(fibre, cell.messages[index], o, s);
  }
  if (index != 0) scheduler.current()->read_stale = true;
  return low_bits(cell.messages[index].value >> (8 * (where - base)), bytes);
}

void Memory::store(void* p, uint64_t value, uint32_t bytes, order o, scope s, site at) {
  check_mapped(p, at);
  const bool inside = contains(p);
  if (weak_ && (inside || !is_private(o))) {
    const Region& region = inside ? region_of(offset(p)) : kOutside;
    const uint32_t fibre = scheduler.current()->id;
    const uint64_t where = inside ? offset(p) : 0;
    uint64_t base = 0;
    Cell& cell = inside ? cell_of(where, region, base) : outside_cell(p, bytes);
    check_store(fibre, cell, region, o == order::kPlain, p, at);
    push(fibre, cell, region, merge(cell.messages[0].value, where - base, value, bytes), o, s,
         false, at);
  }
  write(p, value, bytes);
}

template <typename Change>
uint64_t Memory::modify(void* p, uint32_t bytes, order o, site at, Change change) {
  check_mapped(p, at);
  const uint64_t before = peek(p, bytes);
  uint64_t after = before;
  const bool changes = change(before, after);
  if (weak_) {
    const bool inside = contains(p);
    const Region& region = inside ? region_of(offset(p)) : kOutside;
    const uint32_t fibre = scheduler.current()->id;
    const uint64_t where = inside ? offset(p) : 0;
    uint64_t base = 0;
    Cell& cell = inside ? cell_of(where, region, base) : outside_cell(p, bytes);
    check_load(fibre, cell, region, false, p, at);
    see(fibre, cell, 0);
    receive(fibre, cell.messages[0], o, scope::kDevice);
    if (changes) {
      check_store(fibre, cell, region, false, p, at);
      push(fibre, cell, region, merge(cell.messages[0].value, where - base, after, bytes), o,
           scope::kDevice, true, at);
    }
  }
  if (changes) write(p, after, bytes);
  return before;
}

void Memory::fence(fence_kind kind) {
  if (!weak_) return;
  const uint32_t fibre = scheduler.current()->id;
  uint32_t* mine = clock(fibre);
  const uint64_t row = uint64_t(fibre) * fibres_;
  const bool everywhere = kind == fence_kind::kSequentialSystem;
  const bool system = everywhere || kind == fence_kind::kSystem;
  for (uint32_t i = 0; i < fibres_; ++i) {
    mine[i] = std::max(mine[i], pending_device_[row + i]);
    if (system) mine[i] = std::max(mine[i], pending_system_[row + i]);
  }
  if (kind == fence_kind::kSequential) {
    for (uint32_t i = 0; i < fibres_; ++i) {
      mine[i] = global_[i] = std::max(mine[i], global_[i]);
    }
  }
  if (everywhere) {
    // Of the host's fences, those of the device at smaller scope mean nothing.
    const bool device = !scheduler.fibre(fibre).is_host;
    for (uint32_t i = 0; i < fibres_; ++i) {
      if (device) mine[i] = std::max(mine[i], global_[i]);
      mine[i] = global_system_[i] = std::max(mine[i], global_system_[i]);
      if (device) global_[i] = mine[i];
    }
  }
  if (kind == fence_kind::kAcquire) return;
  fence_device_[fibre] = snapshot(fibre);
  if (system) fence_system_[fibre] = fence_device_[fibre];
}

void Memory::settle_stores() { horizon_ = scheduler.accesses(); }

void Memory::begin_transfer() {
  const Fibre& f = *scheduler.current();
  if (weak_ && f.is_host) transfer_[f.id] = snapshot(f.id);
}

void Memory::check_handed_over(const void* p, uint64_t bytes) {
  if (!weak_) return;
  const uint32_t fibre = scheduler.current()->id;
  for (uint64_t at = offset(p); at < offset(p) + bytes; at += region_of(at).cell_bytes) {
    uint64_t base = 0;
    const Cell& cell = cell_of(at, region_of(at), base);
    for (uint32_t f = 0; f < fibres_ && cell.loads != kNone; ++f) {
      if (f == fibre || snapshot_knows(fence_system_[fibre], f, tables_[cell.loads + f])) continue;
      report_race(arena_ + at, "handing over", f, {__FILE__, __LINE__}, {});
    }
  }
}

void Memory::synchronize(uint32_t first_fibre, uint32_t lanes) {
  if (!weak_) return;
  std::vector<uint32_t> all(fibres_, 0);
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const uint32_t* from = clock(first_fibre + base::lowest_bit(rest));
    for (uint32_t i = 0; i < fibres_; ++i) all[i] = std::max(all[i], from[i]);
  }
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const uint32_t fibre = first_fibre + base::lowest_bit(rest);
    std::copy(all.begin(), all.end(), clock(fibre));
    ++clock(fibre)[fibre];
  }
}

void Memory::report_race(const void* p, const char* what, uint32_t other, site at, site other_at) {
  const Fibre& f = scheduler.fibre(other);
  std::string text =
      "data race: " + std::string(what) + " of " + describe(p, peek(p, 8)) + " at " + place_of(at) +
      " is not ordered after the one of " +
      (f.is_host ? "controller " + std::to_string(f.index)
                 : "warp " + std::to_string(f.warp) + " lane " + std::to_string(f.lane));
  if (other_at.file != nullptr) text += " at " + place_of(other_at);
  scheduler.fail(text);
}

// The hooks. Outside of a launch there are no fibres to schedule.

namespace {

bool running() { return scheduler.current() != nullptr; }

}  // namespace

bool is_of_block(const void* p) { return memory.of_block(p); }

uint64_t load(const void* p, uint32_t bytes, order o, scope s, site at) {
  if (!running()) return peek(p, bytes);
  scheduler.point(Event::kLoad, p);
  const uint64_t value = memory.load(p, bytes, o, s, at);
  scheduler.note(Event::kLoad, p, value, at);
  return value;
}

void store(void* p, uint64_t value, uint32_t bytes, order o, scope s, site at) {
  if (!running()) {
    std::memcpy(p, &value, bytes);
    return;
  }
  scheduler.point(Event::kStore, p);
  scheduler.note(Event::kStore, p, value, at);
  memory.store(p, value, bytes, o, s, at);
}

namespace {

template <typename Change>
uint64_t modify(void* p, uint32_t bytes, order o, site at, Change change) {
  if (!running()) {
    const uint64_t before = peek(p, bytes);
    uint64_t after = before;
    if (change(before, after)) std::memcpy(p, &after, bytes);
    return before;
  }
  scheduler.point(Event::kModify, p);
  const uint64_t before = memory.modify(p, bytes, o, at, change);
  scheduler.note(Event::kModify, p, peek(p, bytes), at);
  return before;
}

}  // namespace

uint64_t add(void* p, uint64_t value, uint32_t bytes, order o, site at) {
  return modify(p, bytes, o, at, [=](uint64_t before, uint64_t& after) {
    after = low_bits(before + value, bytes);
    return true;
  });
}

uint64_t set_bits(void* p, uint64_t bits, uint32_t bytes, order o, site at) {
  return modify(p, bytes, o, at, [=](uint64_t before, uint64_t& after) {
    after = before | bits;
    return true;
  });
}

uint64_t keep_bits(void* p, uint64_t bits, uint32_t bytes, order o, site at) {
  return modify(p, bytes, o, at, [=](uint64_t before, uint64_t& after) {
    after = before & bits;
    return true;
  });
}

bool compare_and_swap(void* p, uint64_t expected, uint64_t desired, uint32_t bytes, order o,
                      site at) {
  const uint64_t before = modify(p, bytes, o, at, [=](uint64_t seen, uint64_t& after) {
    after = desired;
    return seen == expected;
  });
  return before == expected;
}

void fence(fence_kind kind, site at) {
  if (!running()) return;
  scheduler.point(Event::kFence, nullptr);
  scheduler.note(Event::kFence, nullptr, 0, at);
  memory.fence(kind);
}

uint64_t load_data(const void* p, uint32_t bytes, order o, site at) {
  if (!running()) return peek(p, bytes);
  scheduler.data_point(Event::kLoad, p);
  const uint64_t value = memory.load(p, bytes, o, scope::kDevice, at);
  scheduler.note(Event::kLoad, p, value, at);
  return value;
}

void store_data(void* p, uint64_t value, uint32_t bytes, order o, site at) {
  if (!running()) {
    std::memcpy(p, &value, bytes);
    return;
  }
  scheduler.data_point(Event::kStore, p);
  scheduler.note(Event::kStore, p, value, at);
  memory.store(p, value, bytes, o, scope::kDevice, at);
}

namespace {

// The next step of a bulk access: whole cells where both sides allow it.
uint32_t step_of(uint64_t a, uint64_t b, uint64_t rest) {
  if (((a | b) & 7) == 0 && rest >= 8) return 8;
  return ((a | b) & 3) == 0 && rest >= 4 ? 4 : 1;
}

}  // namespace

void copy_data(void* to, const void* from, uint64_t bytes, site at) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  if (running()) memory.begin_transfer();
  for (uint64_t done = 0; done < bytes;) {
    const uint32_t step = step_of(reinterpret_cast<uintptr_t>(target + done),
                                  reinterpret_cast<uintptr_t>(source + done), bytes - done);
    const uint64_t value = load_data(source + done, step, order::kPlain, at);
    store_data(target + done, value, step, order::kPlain, at);
    done += step;
  }
}

void fill_data(void* to, uint8_t value, uint64_t bytes, site at) {
  char* target = static_cast<char*>(to);
  if (running()) memory.begin_transfer();
  for (uint64_t done = 0; done < bytes;) {
    const uint32_t step = step_of(reinterpret_cast<uintptr_t>(target + done), 0, bytes - done);
    store_data(target + done, value * 0x0101010101010101u, step, order::kPlain, at);
    done += step;
  }
}

uint32_t ballot(uint32_t mask, bool predicate, site at) {
  return uint32_t(scheduler.meet(Scheduler::Meeting::kBallot, mask, predicate, 0, at));
}
uint32_t match(uint32_t mask, uint64_t value, site at) {
  return uint32_t(scheduler.meet(Scheduler::Meeting::kMatch, mask, value, 0, at));
}
uint64_t take(uint32_t mask, uint64_t value, uint32_t source, site at) {
  return scheduler.meet(Scheduler::Meeting::kTake, mask, value, source, at);
}
void sync(uint32_t mask, site at) { scheduler.meet(Scheduler::Meeting::kSync, mask, 0, 0, at); }

uint32_t active(site at) {
  // The call, and how deep it stands: lanes in other instances of a template are elsewhere.
  const auto call = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  const auto depth =
      scheduler.current()->stack.top() - static_cast<char*>(__builtin_frame_address(0));
  return scheduler.converge(call ^ uintptr_t(depth) << 48, at);
}

uint32_t spread_index() { return running() ? scheduler.spread_index() : here->spread; }

uint64_t clock_ns() { return scheduler.clock_ns(); }

void pause(uint32_t ns) {
  if (running()) scheduler.pause(ns);
}

void fail_assertion(const char* condition, site at) {
  scheduler.fail("assertion at " + place_of(at) + ": " + condition);
}

}  // namespace fw::simulator

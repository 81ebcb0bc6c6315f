// The program around the scenarios: seeds in, one line of JSON out, and a failure in full.
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "run.h"

namespace fw::simulator {

std::vector<Scenario>& scenarios() {
  static std::vector<Scenario> all;
  return all;
}

namespace {

struct FaultField {
  const char* name;
  uint32_t Faults::* member;
};
constexpr FaultField kFaultFields[] = {
    {"errors", &Faults::errors},
    {"torn", &Faults::torn},
    {"wait", &Faults::wait},
    {"delay", &Faults::delay},
    {"coalesce", &Faults::coalesce},
    {"stop_after", &Faults::stop_after},
    {"stop_for", &Faults::stop_for},
    {"suspend_after", &Faults::suspend_after},
    {"suspend_ns", &Faults::suspend_ns},
};

}  // namespace

std::string text_of(const Faults& faults) {
  std::string text;
  for (const FaultField& field : kFaultFields) {
    if (faults.*field.member == 0) continue;
    if (!text.empty()) text += ",";
    text += std::string(field.name) + "=" + std::to_string(faults.*field.member);
  }
  return text.empty() ? "none" : text;
}

Faults parse_faults(const std::string& text) {
  Faults faults;
  if (text == "none") return faults;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    const size_t equals = item.find('=');
    bool known = false;
    for (const FaultField& field : kFaultFields) {
      if (item.substr(0, equals) != field.name || equals == std::string::npos) continue;
      faults.*field.member = uint32_t(std::stoul(item.substr(equals + 1)));
      known = true;
    }
    if (!known) throw std::invalid_argument("not a fault: " + item);
    begin = end + 1;
  }
  return faults;
}

namespace {

struct Options {
  std::string scenario;  // empty: all in turn
  int mode = -1;         // -1: the seed chooses
  int strategy = -1;
  uint64_t first = 0;
  uint64_t last = 1000;
  double seconds = 1e9;
  bool faults_given = false;
  Faults faults;
  uint32_t preemptions = 2;
  bool trace = false;
  bool list = false;
};

struct Totals {
  uint64_t schedules = 0;
  uint64_t hash = 0;  // of all schedules
  bool exhausted = false;
};

const char* kModeNames[] = {"sc", "weak"};

template <size_t kCount>
int index_of(const char* const (&names)[kCount], const std::string& name) {
  for (size_t i = 0; i < kCount; ++i) {
    if (name == names[i]) return int(i);
  }
  throw std::invalid_argument("unknown: " + name);
}

Options parse(int count, char** arguments) {
  Options o;
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    if (name == "--trace" || name == "--list") {
      (name == "--trace" ? o.trace : o.list) = true;
      continue;
    }
    if (++i == count) throw std::invalid_argument(name + " needs a value");
    const std::string value = arguments[i];
    if (name == "--scenario") {
      o.scenario = value;
    } else if (name == "--mode") {
      o.mode = value == "any" ? -1 : index_of(kModeNames, value);
    } else if (name == "--strategy") {
      o.strategy = value == "any" ? -1 : index_of(kStrategyNames, value);
    } else if (name == "--seeds") {
      const size_t colon = value.find(':');
      o.first = std::stoull(value);
      o.last = colon == std::string::npos ? o.first + 1 : std::stoull(value.substr(colon + 1));
    } else if (name == "--seconds") {
      o.seconds = std::stod(value);
    } else if (name == "--faults") {
      o.faults_given = true;
      o.faults = parse_faults(value);
    } else if (name == "--preemptions") {
      o.preemptions = uint32_t(std::stoul(value));
    } else {
      throw std::invalid_argument("unknown option " + name);
    }
  }
  return o;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What the seed decides where the command line does not.
Run make_run(const Options& o, uint64_t seed) {
  constexpr Strategy kStrategies[] = {Strategy::kRandom, Strategy::kRandom, Strategy::kPriority,
                                      Strategy::kRival, Strategy::kRoundRobin};
  Random choice(seed, 7);
  Run run;
  run.seed = seed;
  const MemoryMode mode = choice.chance(50) ? MemoryMode::kWeak : MemoryMode::kSequential;
  const Strategy strategy = choice.pick(kStrategies);
  run.mode = o.mode < 0 ? mode : MemoryMode(o.mode);
  run.strategy = o.strategy < 0 ? strategy : Strategy(o.strategy);
  run.faults_given = o.faults_given;
  run.faults = o.faults;
  run.random = Random(seed, 8);
  return run;
}

void execute(const Options& o, const Scenario& scenario, Run& run, Explorer* explorer) {
  Plan plan;
  plan.seed = run.seed;
  plan.strategy = run.strategy;
  plan.preemptions = o.preemptions;
  plan.traced = o.trace;
  scheduler.begin(plan, explorer);
  memory.begin(run.mode, run.seed);
  scenario.body(run);
}

void report(const Scenario& scenario, const Run& run, const Failure& failure, uint64_t schedule) {
  std::printf("FAILED scenario %s, width %u, seed %llu, mode %s, strategy %s, faults %s",
              scenario.name, scenario.width, (unsigned long long)run.seed,
              kModeNames[size_t(run.mode)], kStrategyNames[size_t(run.strategy)],
              text_of(run.faults).c_str());
  if (run.exhaustive()) std::printf(", schedule %llu", (unsigned long long)schedule);
  std::printf("\n%s", failure.what());
  std::printf("replay: --scenario %s --width %u --mode %s --strategy %s --seeds %llu:%llu",
              scenario.name, scenario.width, kModeNames[size_t(run.mode)],
              kStrategyNames[size_t(run.strategy)], (unsigned long long)run.seed,
              (unsigned long long)run.seed + 1);
  if (run.faults_given) std::printf(" --faults %s", text_of(run.faults).c_str());
  std::printf("\n");
}

// True when all went well.
bool explore(const Options& o, const Scenario& scenario, uint64_t seed, double end, Totals& t) {
  Explorer explorer;
  const bool exhaustive = o.strategy == int(Strategy::kExhaustive);
  for (uint64_t schedule = 0; !exhaustive || explorer.next(); ++schedule) {
    Run run = make_run(o, seed);
    try {
      execute(o, scenario, run, exhaustive ? &explorer : nullptr);
    } catch (const Failure& failure) {
      report(scenario, run, failure, schedule);
      return false;
    }
    ++t.schedules;
    t.hash = mix(t.hash ^ scheduler.hash());
    if (!exhaustive || seconds_now() > end) return true;
  }
  t.exhausted = true;
  return true;
}

bool run_all(const Options& o, Totals& t) {
  const double end = seconds_now() + o.seconds;
  for (uint64_t seed = o.first; seed != o.last && seconds_now() < end; ++seed) {
    for (const Scenario& scenario : scenarios()) {
      if (!o.scenario.empty() && o.scenario != scenario.name) continue;
      if (!explore(o, scenario, seed, end, t)) return false;
    }
  }
  return true;
}

int run_program(int count, char** arguments) {
  const Options o = parse(count, arguments);
  // The order of registration is the linker's.
  std::sort(scenarios().begin(), scenarios().end(),
            [](const Scenario& a, const Scenario& b) { return std::strcmp(a.name, b.name) < 0; });
  if (o.list) {
    for (const Scenario& s : scenarios()) std::printf("%-16s %s\n", s.name, s.about);
    return 0;
  }
  const bool known =
      o.scenario.empty() || std::any_of(scenarios().begin(), scenarios().end(),
                                        [&](const Scenario& s) { return o.scenario == s.name; });
  if (!known) throw std::invalid_argument("no such scenario: " + o.scenario);
  Totals t;
  const double begin = seconds_now();
  const bool ok = run_all(o, t);
  const double seconds = seconds_now() - begin;
  std::printf(
      "{\"ok\": %s, \"schedules\": %llu, \"points\": %llu, \"accesses\": %llu, "
      "\"seconds\": %.3f, \"exhausted\": %s, \"hash\": \"%016llx\"}\n",
      ok ? "true" : "false", (unsigned long long)t.schedules,
      (unsigned long long)scheduler.points(), (unsigned long long)scheduler.accesses(), seconds,
      t.exhausted ? "true" : "false", (unsigned long long)t.hash);
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace fw::simulator

int main(int count, char** arguments) {
  // End with the process that started this one.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    return fw::simulator::run_program(count, arguments);
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

// One run: the decisions of the command line and the seed, for the scenario.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory.h"
#include "random.h"
#include "scheduler.h"

namespace fw::simulator {

// Faults of the storage and the controller. Probabilities are in percent.
struct Faults {
  uint32_t errors = 0;         // commands that fail in the storage
  uint32_t torn = 0;           // engine transfers that move only a part
  uint32_t wait = 0;           // commands that wait for the engine
  uint32_t delay = 0;          // most sweeps that an operation stays in the engine
  uint32_t coalesce = 0;       // most sweeps that a controller looks away between two looks
  uint32_t stop_after = 0;     // sweeps after which the controllers stop; 0: never
  uint32_t stop_for = 0;       // sweeps for which they stop; 0: for good
  uint32_t suspend_after = 0;  // sweeps after which the host's process is stopped, heart and all
  uint32_t suspend_ns = 0;     // the time for which it is; 0: for good

  bool loses_host() const { return suspend_after != 0 && suspend_ns == 0; }
};

// As text, both ways: "errors=5,delay=20". Throws std::invalid_argument.
std::string text_of(const Faults& faults);
Faults parse_faults(const std::string& text);

struct Run {
  uint64_t seed = 0;
  MemoryMode mode = MemoryMode::kSequential;
  Strategy strategy = Strategy::kRandom;
  bool faults_given = false;
  Faults faults;
  Random random;  // the scenario's own choices

  bool exhaustive() const { return strategy == Strategy::kExhaustive; }
};

// A scenario builds machines, launches threads on them and checks what they did.
struct Scenario {
  const char* name;
  const char* about;
  void (*body)(Run& run);
  uint32_t width;  // lanes of a warp
};
std::vector<Scenario>& scenarios();

struct Registration {
  Registration(const char* name, const char* about, void (*body)(Run&)) {
    scenarios().push_back({name, about, body, FW_WARP_WIDTH});
  }
};

}  // namespace fw::simulator

// Defines a scenario; its body follows, and gets `run`.
#define FW_SCENARIO(NAME, ABOUT)                                                          \
  static void fw_scenario_##NAME(::fw::simulator::Run& run);                              \
  static const ::fw::simulator::Registration fw_registration_##NAME(#NAME, ABOUT,         \
                                                                    &fw_scenario_##NAME); \
  static void fw_scenario_##NAME([[maybe_unused]] ::fw::simulator::Run& run)

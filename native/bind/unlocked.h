// Releases the GIL for the duration of a scope.
//
// If a thread takes the GIL back while the interpreter exits, CPython ends the thread through
// pthread_exit, which unwinds the stack. In C++ frames that would end the process ("terminate
// called"). Such a thread sleeps here instead, until the process ends.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace fw::native {

// Calls code of Python from C++ frames whose destructors need the GIL.
template <typename Act>
auto staying(Act act) {
  try {
    return act();
  } catch (abi::__forced_unwind&) {
    // Leaving this block without rethrowing would end the process as well.
    while (true) pause();
  }
}

class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    staying([&] { PyEval_RestoreThread(state_); });
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* const state_;
};

template <typename Act>
auto unlocked(Act act) {
  const Unlocked scope;
  return act();
}

}  // namespace fw::native

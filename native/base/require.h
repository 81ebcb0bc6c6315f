// The check of an argument: what fails it is an invalid_argument, ValueError in Python.
#pragma once

#include <stdexcept>

namespace fw::native {

inline void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

}  // namespace fw::native

// Calls that no signal handler interrupts, which Python cannot make by itself.
//
// A handler that raises may do so between any two lines of Python on the main thread, even in a
// `finally`. In these functions no handler can run between taking a lock and releasing it, or
// between steps that must be done together.
//
// They are plain functions of the C API, without objects that have destructors. When the
// interpreter exits, it ends daemon threads inside the Python code that these functions call, by
// unwinding their stacks without the GIL.
#include <nanobind/nanobind.h>

#include <system_error>
#include <thread>

#include "bind/unlocked.h"

namespace nb = nanobind;
using fw::native::Unlocked;

void bind_endings(nb::module_& m);

namespace {

// The result of a call. Another thread than the one that made the call returns it.
struct Outcome {
  PyObject* result;
  PyObject *type, *value, *trace;
};

void call(PyObject* act, Outcome& outcome) {
  outcome.result = PyObject_CallNoArgs(act);
  if (outcome.result == nullptr) PyErr_Fetch(&outcome.type, &outcome.value, &outcome.trace);
}

PyObject* give(const Outcome& outcome) {
  if (outcome.result == nullptr) PyErr_Restore(outcome.type, outcome.value, outcome.trace);
  return outcome.result;
}

// Python runs signal handlers in the main thread only. Returns false if no thread can be started.
bool call_in_thread(PyObject* act, Outcome& outcome) {
  try {
    std::thread thread([act, &outcome] {
      const PyGILState_STATE state = PyGILState_Ensure();
      call(act, outcome);
      PyGILState_Release(state);
    });
    const Unlocked unlocked;
    thread.join();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

PyObject* uninterrupted(PyObject*, PyObject* act) {
  Outcome outcome;
  if (!call_in_thread(act, outcome)) call(act, outcome);
  return give(outcome);
}

PyObject* call_method(PyObject* object, const char* name) {
  return PyObject_CallMethod(object, name, nullptr);
}

PyObject* holding(PyObject*, PyObject* arguments) {
  PyObject *lock, *act;
  if (!PyArg_ParseTuple(arguments, "OO:holding", &lock, &act)) return nullptr;
  // May be interrupted; then the lock is not held.
  PyObject* held = call_method(lock, "acquire");
  if (held == nullptr) return nullptr;
  Py_DECREF(held);
  Outcome outcome;
  call(act, outcome);
  PyObject* free = call_method(lock, "release");
  if (free == nullptr) PyErr_WriteUnraisable(lock);
  Py_XDECREF(free);
  return give(outcome);
}

PyMethodDef methods[] = {
    {"uninterrupted", &uninterrupted, METH_O, "Call a function where no signal handler runs."},
    {"holding", &holding, METH_VARARGS, "Call a function while holding a lock."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_endings(nb::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw nb::python_error();
}

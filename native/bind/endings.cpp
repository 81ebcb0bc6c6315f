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
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
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

// A thread that makes the calls of the main thread, one at a time, where no handler runs. Python
// runs handlers in the main thread only.
class Helper {
 public:
  // Throws std::system_error if no thread can be started.
  Helper() : process_(getpid()) {
    std::thread([this] { run(); }).detach();
  }

  // A forked child has no thread of its parent's.
  bool lives() const { return process_ == getpid(); }

  void make(PyObject* act, Outcome& outcome) {
    const Unlocked unlocked;
    std::unique_lock lock(guard_);
    act_ = act;
    outcome_ = &outcome;
    changed_.notify_all();
    changed_.wait(lock, [this] { return act_ == nullptr; });
  }

 private:
  void run() {
    PyGILState_Ensure();  // once: the thread keeps its state until the process ends
    PyThreadState* state = PyEval_SaveThread();
    std::unique_lock lock(guard_);
    while (true) {
      changed_.wait(lock, [this] { return act_ != nullptr; });
      lock.unlock();
      PyEval_RestoreThread(state);
      call(act_, *outcome_);
      state = PyEval_SaveThread();
      lock.lock();
      act_ = nullptr;
      changed_.notify_all();
    }
  }

  const pid_t process_;
  std::mutex guard_;
  std::condition_variable changed_;
  PyObject* act_ = nullptr;
  Outcome* outcome_ = nullptr;
};

void make_elsewhere(PyObject* act, Outcome& outcome) {
  // Never freed: its thread waits until the process ends. Used by the main thread alone.
  static Helper* helper = nullptr;
  try {
    if (helper == nullptr || !helper->lives()) helper = new Helper;
    helper->make(act, outcome);
  } catch (const std::system_error&) {
    call(act, outcome);
  }
}

PyObject* uninterrupted(PyObject*, PyObject* arguments) {
  PyObject *act, *lost = nullptr;
  if (!PyArg_ParseTuple(arguments, "O|O:uninterrupted", &act, &lost)) return nullptr;
  Outcome outcome;
  make_elsewhere(act, outcome);
  if (lost == nullptr || lost == Py_None || outcome.result == nullptr) return give(outcome);
  if (PyErr_CheckSignals() == 0) return outcome.result;
  // A signal came meanwhile, and its handler raised: nobody will get the result.
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Outcome ended;
  make_elsewhere(lost, ended);
  if (give(ended) == nullptr) PyErr_WriteUnraisable(lost);
  Py_XDECREF(ended.result);
  Py_DECREF(outcome.result);
  PyErr_Restore(type, value, trace);
  return nullptr;
}

// A call in a thread of its own, which the main thread waits for.
struct Aside {
  std::mutex guard;
  std::condition_variable ended;
  bool over = false;
  Outcome outcome;

  bool wait(std::chrono::milliseconds limit) {
    const Unlocked unlocked;
    std::unique_lock lock(guard);
    return ended.wait_for(lock, limit, [this] { return over; });
  }

  void run(PyObject* act) {
    const PyGILState_STATE state = PyGILState_Ensure();
    call(act, outcome);
    PyGILState_Release(state);
    const std::lock_guard lock(guard);
    over = true;
    ended.notify_all();
  }
};

constexpr std::chrono::milliseconds kLook{20};  // how late a signal may be noticed

PyObject* aside(PyObject*, PyObject* arguments) {
  PyObject *act, *stop;
  if (!PyArg_ParseTuple(arguments, "OO:aside", &act, &stop)) return nullptr;
  Aside made;
  std::thread thread;
  try {
    thread = std::thread([&] { made.run(act); });
  } catch (const std::system_error&) {
    return PyObject_CallNoArgs(act);
  }
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  while (!made.wait(kLook)) {
    if (type != nullptr || PyErr_CheckSignals() == 0) continue;
    PyErr_Fetch(&type, &value, &trace);
    PyObject* stopped = PyObject_CallNoArgs(stop);
    if (stopped == nullptr) PyErr_Clear();  // by another signal
    Py_XDECREF(stopped);
  }
  thread.join();
  if (type == nullptr) return give(made.outcome);
  PyObject* result = give(made.outcome);
  if (result == nullptr) PyErr_Clear();
  Py_XDECREF(result);
  PyErr_Restore(type, value, trace);
  return nullptr;
}

PyObject* call_method(PyObject* object, const char* name) {
  return PyObject_CallMethod(object, name, nullptr);
}

PyObject* holding(PyObject*, PyObject* arguments) {
  PyObject *lock, *act;
  int waits = 1;
  if (!PyArg_ParseTuple(arguments, "OO|p:holding", &lock, &act, &waits)) return nullptr;
  // May be interrupted; then the lock is not held.
  PyObject* held = PyObject_CallMethod(lock, "acquire", "i", waits);
  if (held == nullptr) return nullptr;
  const bool taken = PyObject_IsTrue(held) == 1;
  Py_DECREF(held);
  if (!taken) Py_RETURN_NONE;
  Outcome outcome;
  call(act, outcome);
  PyObject* free = call_method(lock, "release");
  if (free == nullptr) PyErr_WriteUnraisable(lock);
  Py_XDECREF(free);
  return give(outcome);
}

// Waits for `waiter`, another lock, without `lock`, and takes it again however the wait ends.
PyObject* released(PyObject*, PyObject* arguments) {
  PyObject *lock, *waiter, *seconds;
  if (!PyArg_ParseTuple(arguments, "OOO:released", &lock, &waiter, &seconds)) return nullptr;
  PyObject* state = call_method(lock, "_release_save");
  if (state == nullptr) return nullptr;
  Outcome outcome;
  outcome.result = PyObject_CallMethod(waiter, "acquire", "OO", Py_True, seconds);
  if (outcome.result == nullptr) PyErr_Fetch(&outcome.type, &outcome.value, &outcome.trace);
  PyObject* taken = PyObject_CallMethod(lock, "_acquire_restore", "(O)", state);
  if (taken == nullptr) PyErr_WriteUnraisable(lock);
  Py_XDECREF(taken);
  Py_DECREF(state);
  return give(outcome);
}

// `with` statements. Looking up `__exit__` makes a guard, which the statement keeps on its stack,
// and `__enter__` arms it once the lock is taken. Wherever a handler raises, the guard is called or
// freed, and either releases the lock.
struct Guard {
  PyObject_HEAD  //
      PyObject* lock;
  bool armed;
};

PyTypeObject* guard_type = nullptr;

// That of the `with` statement which this thread begins. No code runs between look-up and call.
thread_local Guard* beginning = nullptr;

bool release(PyObject* lock) {
  PyObject* free = call_method(lock, "release");
  Py_XDECREF(free);
  return free != nullptr;
}

PyObject* make_guard(PyObject*, PyObject* lock, PyObject*) {
  if (lock == nullptr || lock == Py_None) {
    PyErr_SetString(PyExc_TypeError, "a lock is left by `with`, not by its type");
    return nullptr;
  }
  Guard* guard = PyObject_New(Guard, guard_type);
  if (guard == nullptr) return nullptr;
  Py_INCREF(lock);
  guard->lock = lock;
  guard->armed = false;
  beginning = guard;
  return reinterpret_cast<PyObject*>(guard);
}

PyObject* enter(PyObject* lock, PyObject*) {
  Guard* guard = beginning;
  beginning = nullptr;  // handlers that run while it waits may begin others
  PyObject* held = call_method(lock, "acquire");
  if (held != nullptr && guard != nullptr && guard->lock == lock) guard->armed = true;
  return held;
}

PyObject* leave(PyObject* self, PyObject* arguments, PyObject*) {
  Guard* guard = reinterpret_cast<Guard*>(self);
  guard->armed = false;
  if (!release(guard->lock)) {
    // What ended the statement matters more than a lock that is free already.
    if (PyTuple_Size(arguments) < 1 || PyTuple_GetItem(arguments, 0) == Py_None) return nullptr;
    PyErr_Clear();
  }
  Py_RETURN_NONE;
}

void free_guard(PyObject* self) {
  Guard* guard = reinterpret_cast<Guard*>(self);
  if (beginning == guard) beginning = nullptr;
  if (guard->armed) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (!release(guard->lock)) PyErr_WriteUnraisable(guard->lock);
    PyErr_Restore(type, value, trace);
  }
  Py_DECREF(guard->lock);
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

// The ends of a `with` statement. A Python function looks for signals before its first line. If a
// handler raised there at the begin, the frame would keep the thing, open, until others that it
// stands on have been closed; at the end, nothing would be closed.
PyObject* enter_closing(PyObject* self, PyObject*) {
  Py_INCREF(self);
  return self;
}

PyObject* leave_closing(PyObject* self, PyObject*) {
  PyObject* closed = call_method(self, "close");
  if (closed != nullptr) {
    Py_DECREF(closed);
    Py_RETURN_NONE;
  }
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* ended = PyObject_CallMethod(self, "_end_interrupted", "O", value);
  if (ended == nullptr) PyErr_WriteUnraisable(self);
  Py_XDECREF(ended);
  PyErr_Restore(type, value, trace);
  return nullptr;
}

PyObject* make_type(PyType_Spec& spec) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw nb::python_error();
  return type;
}

// `Held`, the base of locks for `with` statements; see `flashwarp.endings.Lock`.
nb::object held_type() {
  static PyType_Slot guard_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&free_guard)},
                                      {Py_tp_call, reinterpret_cast<void*>(&leave)},
                                      {0, nullptr}};
  static PyType_Spec guard_spec = {"flashwarp._native.Guard", sizeof(Guard), 0, Py_TPFLAGS_DEFAULT,
                                   guard_slots};
  static PyType_Slot exit_slots[] = {{Py_tp_descr_get, reinterpret_cast<void*>(&make_guard)},
                                     {0, nullptr}};
  static PyType_Spec exit_spec = {"flashwarp._native.Exit", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT,
                                  exit_slots};
  static PyMethodDef held_methods[] = {{"__enter__", &enter, METH_NOARGS, "Take the lock."},
                                       {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot held_slots[] = {{Py_tp_methods, held_methods}, {0, nullptr}};
  static PyType_Spec held_spec = {"flashwarp._native.Held", sizeof(PyObject), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, held_slots};
  guard_type = reinterpret_cast<PyTypeObject*>(make_type(guard_spec));
  nb::object held = nb::steal(make_type(held_spec));
  nb::object exit_type = nb::steal(make_type(exit_spec));
  held.attr("__exit__") = exit_type();
  return held;
}

// `Scoped`, the base of what a `with` statement closes; see `flashwarp.endings.Scoped`.
nb::object scoped_type() {
  static PyMethodDef methods[] = {
      {"__enter__", &enter_closing, METH_NOARGS, "Return the object."},
      {"__exit__", &leave_closing, METH_VARARGS, "Close, also if a signal handler raises first."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_methods, methods}, {0, nullptr}};
  static PyType_Spec spec = {"flashwarp._native.Scoped", sizeof(PyObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
  return nb::steal(make_type(spec));
}

PyMethodDef methods[] = {
    {"uninterrupted", &uninterrupted, METH_VARARGS,
     "Call a function where no signal handler runs, and `lost` if one raises then."},
    {"aside", &aside, METH_VARARGS, "Call a function elsewhere, and another if a signal comes."},
    {"holding", &holding, METH_VARARGS,
     "Call a function while holding a lock; without `waits`, if it is free."},
    {"released", &released, METH_VARARGS, "Wait for a lock without another one."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_endings(nb::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw nb::python_error();
  m.attr("Held") = held_type();
  m.attr("Scoped") = scoped_type();
}

#pragma once

#include <exception>
#include <utility>

#include "state.hpp"

namespace kvrelay::detail {

/// Gives the GIL away for a while, if this thread has it: a host's own Python thread may call us.
class WithoutGil {
 public:
  WithoutGil() : saved_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* saved_;
};

/// One stay of this thread in Python, GIL held. The host's code is never called within it.
class Call {
 public:
  explicit Call(std::uint64_t made_in, bool opening = false)
      : opening_(opening), stops_(State::get().enter(made_in, opening)), gil_(PyGILState_Ensure()) {
    if (stops_ == State::get().stops) return;
    // Work was stopped while this thread waited for the GIL, and so the stop did not reach it.
    finish();
    throw shutdown_error();
  }
  ~Call() { finish(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  /// To be called before an exception leaves: if the process is ending, this thread rests here. A thread whose function
  /// does not catch the exception would end the process by std::terminate without running a destructor.
  void before_throwing() noexcept {
    const State& state = State::get();
    if (state.others_end()) finish();
  }

 private:
  void finish() noexcept {
    State& state = State::get();
    // Before the GIL goes: stop() raises an exception in threads that are inside, and must not reach this one later.
    if (state.leave(opening_) && stops_ != state.stops) PyThreadState_SetAsyncExc(State::thread(), nullptr);
    PyGILState_Release(gil_);
    if (state.others_end()) park();
  }

  bool opening_;
  std::uint64_t stops_;
  PyGILState_STATE gil_;
};

/// Keeps Python's record of this thread between calls: making one for each token costs more than the rest of a call.
class Attached {
 public:
  Attached() {
    State::get().refuse(any_epoch);
    gil_ = PyGILState_Ensure();
    saved_ = PyEval_SaveThread();
  }
  ~Attached() {
    State& state = State::get();
    if (state.lost()) return;
    if (state.others_end()) park();
    PyEval_RestoreThread(saved_);
    PyGILState_Release(gil_);
  }
  Attached(const Attached&) = delete;
  Attached& operator=(const Attached&) = delete;

 private:
  PyGILState_STATE gil_;
  PyThreadState* saved_;
};

/// A Python object that may be dropped on any thread and at any time.
class Ref {
 public:
  Ref() = default;
  explicit Ref(py::object object) : pointer_(object.release().ptr()) {}
  Ref(Ref&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(pointer_, other.pointer_);
    return *this;
  }
  ~Ref() {
    State& state = State::get();
    if (pointer_ == nullptr || state.lost() || state.ends_here()) return;  // left to the end of the process
    try {
      Call call(any_epoch);
      Py_DECREF(pointer_);
    } catch (const Error&) {
      // Work is being stopped: the object is left to the end of the process.
    }
  }

  py::handle get() const noexcept { return pointer_; }

 private:
  PyObject* pointer_ = nullptr;
};

/// Returns a text of Python's as UTF-8. Half characters, which stand for the bytes of a file name that is not UTF-8,
/// become escapes. The GIL is held.
inline std::string utf8_of(py::handle text) {
  const auto bytes = py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes) throw py::error_already_set();
  return bytes;
}

/// Returns `error` in this library's terms. The GIL is held.
inline Error translated(py::error_already_set& error) {
  static constexpr std::pair<const char*, ErrorKind> kinds[] = {
      {"BackendMissingError", ErrorKind::backend_missing},
      {"BundleError", ErrorKind::bundle},
      {"CacheDirectoryError", ErrorKind::cache_directory},
      {"CudaError", ErrorKind::cuda},
      {"EngineError", ErrorKind::engine},
      {"ExactnessError", ErrorKind::exactness},
      {"MemoryBudgetError", ErrorKind::memory_budget},
      {"ParameterError", ErrorKind::parameter},
      {"PlanError", ErrorKind::plan},
      {"PromptError", ErrorKind::prompt},
      {"ThreadCountError", ErrorKind::thread_count},
      {"KvrelayError", ErrorKind::kvrelay},
      {"TimeoutError", ErrorKind::timeout},
  };
  State& state = State::get();
  if (state.shutdown != nullptr && error.matches(state.shutdown)) return shutdown_error();
  std::string type, text;
  ErrorKind kind = ErrorKind::python;
  try {
    type = utf8_of(error.type().attr("__name__"));
    for (py::handle base : py::tuple(error.type().attr("__mro__"))) {
      const std::string name = utf8_of(base.attr("__name__"));
      for (const auto& [known, its_kind] : kinds)
        if (name == known && kind == ErrorKind::python) kind = its_kind;
    }
    text = utf8_of(py::str(error.value()));
  } catch (py::error_already_set&) {  // an exception whose text cannot be made
  }
  if (kind == ErrorKind::python) text = text.empty() ? type : type + ": " + text;
  return {kind, type, text};
}

/// Returns what `body` returns that runs in Python, on behalf of an object that was made in the epoch `made_in`.
/// A Python exception becomes an Error.
template <class Body>
auto in_python(std::uint64_t made_in, Body&& body, bool opening = false) -> decltype(body()) {
  Call call(made_in, opening);
  try {
    return body();
  } catch (py::error_already_set& error) {
    const Error failure = translated(error);
    call.before_throwing();
    throw failure;
  }
}

/// Runs the host's `code` in the middle of an opening, where Python calls back: GIL given away, not counted as inside.
template <class Code>
void outside(Code&& code) {
  State& state = State::get();
  state.leave(true);
  PyThreadState* const saved = PyEval_SaveThread();
  std::exception_ptr error;
  try {
    code();
  } catch (...) {
    error = std::current_exception();
  }
  if (state.others_end()) park();
  PyEval_RestoreThread(saved);
  bool ending = false;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    ending = state.others_end();
    if (!ending) state.return_to(true);
  }
  if (ending) {  // it began before the lock: the exit handler does not wait for this thread
    PyEval_SaveThread();
    park();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace kvrelay::detail

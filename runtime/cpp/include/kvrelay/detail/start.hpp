#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include "call.hpp"
#include "stop.hpp"

namespace kvrelay::detail {

inline Error interpreter_error(const std::string& message) { return {ErrorKind::interpreter, "", message}; }

inline std::filesystem::path default_environment() {
#ifdef KVRELAY_ENVIRONMENT
  return KVRELAY_ENVIRONMENT;
#else
  throw interpreter_error("no Python environment is known: call kvrelay::start(folder) first, or link kvrelay::kvrelay");
#endif
}

/// Makes Python's symbols visible to the extension modules that it will load, and keeps this code mapped for good: the
/// exit handler is in it. Both matter where a host loads the library that contains this code by dlopen, as plug-ins are.
inline void pin_libraries() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&Py_InitializeFromConfig), &info) != 0)
    dlopen(info.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
  if (dladdr(reinterpret_cast<void*>(&pin_libraries), &info) != 0)
    dlopen(info.dli_fname, RTLD_NOW | RTLD_NODELETE | RTLD_NOLOAD);
}

/// Returns the folder of the environment that runs, as the bytes of its name. The GIL is held.
inline std::string running_environment() {
  const py::object prefix = py::module_::import("sys").attr("prefix");
  const auto name = py::reinterpret_steal<py::bytes>(PyUnicode_EncodeFSDefault(prefix.ptr()));
  if (!name) throw py::error_already_set();
  return name;
}

inline void check_status(const PyStatus& status, PyConfig* config, const std::string& environment) {
  if (!PyStatus_Exception(status)) return;
  const std::string text = status.err_msg != nullptr ? status.err_msg : "no reason given";
  if (config != nullptr) PyConfig_Clear(config);
  throw interpreter_error("Python cannot be started in " + environment + ": " + text);
}

/// Starts the interpreter, isolated: no PYTHON* variables, no user site, no current folder in sys.path, no signal
/// handlers, the host's locale left alone. This thread does not hold the GIL afterwards.
inline void launch(const std::filesystem::path& folder) {
  std::error_code failed;
  const std::filesystem::path environment = std::filesystem::absolute(folder, failed).lexically_normal();
  const std::string name = environment.string();
  const std::string version = "python" + std::to_string(PY_MAJOR_VERSION) + "." + std::to_string(PY_MINOR_VERSION);
  if (!std::filesystem::exists(environment / "bin" / "python3", failed))
    throw interpreter_error("no Python environment at " + name + ": it has no bin/python3");
  if (!std::filesystem::exists(environment / "lib" / version, failed))
    throw interpreter_error(name + " is an environment of another Python: this program is linked with " + version +
                            " and looks for lib/" + version + " there");
  pin_libraries();

  PyPreConfig before;
  PyPreConfig_InitIsolatedConfig(&before);
  before.utf8_mode = 1;  // a host need not have called setlocale(): paths must not depend on it
  check_status(Py_PreInitialize(&before), nullptr, name);
  PyConfig config;
  PyConfig_InitIsolatedConfig(&config);
  const std::string program = (environment / "bin" / "python3").string();
  check_status(PyConfig_SetBytesString(&config, &config.program_name, program.c_str()), &config, name);
  check_status(PyConfig_SetBytesString(&config, &config.executable, program.c_str()), &config, name);
  check_status(Py_InitializeFromConfig(&config), &config, name);
  PyConfig_Clear(&config);

  // Python's signal module, once imported, takes SIGINT where the host has left it to its default.
  struct sigaction interrupt{};
  sigaction(SIGINT, nullptr, &interrupt);
  PyObject* signals = PyImport_ImportModule("_signal");
  sigaction(SIGINT, &interrupt, nullptr);
  Py_XDECREF(signals);
  PyErr_Clear();
  PyEval_SaveThread();
}

/// Imports kvrelay into the interpreter that runs, ours or the host's. The GIL is held.
inline void import_package(State& state, bool ours) {
  try {
    py::object package = py::module_::import("kvrelay");
    py::object bridge = py::module_::import("kvrelay.cpp.bridge");
    py::object shutdown = bridge.attr("Shutdown");
    if (!ours) {
      py::module_::import("atexit").attr("register")(py::cpp_function([] {
        State::get().gone = true;  // first, so that nobody begins anew behind the stop
        stop(State::get(), false, std::nullopt);
      }));
    }
    state.package = package.release().ptr();
    state.bridge = bridge.release().ptr();
    state.shutdown = shutdown.release().ptr();
  } catch (py::error_already_set& error) {
    const std::string prefix = running_environment();
    throw interpreter_error("Python runs in " + prefix + " and cannot import kvrelay there (" +
                            translated(error).what() + "): install it with " + prefix +
                            "/bin/python -m pip install 'kvrelay[cpu]'");
  }
}

/// Sees to it that Python runs and has kvrelay. `folder` is the environment to run in; none takes the default one or,
/// where the host runs an interpreter already, that one.
inline void start(const std::optional<std::filesystem::path>& folder = std::nullopt) {
  State& state = State::get();
  if (state.started && !folder) return;
  state.refuse(any_epoch);  // an interpreter that is gone is not started again
  WithoutGil none;  // another thread may be starting, and need the GIL for it
  std::lock_guard<std::mutex> lock(state.start_mutex);
  const bool ours = !Py_IsInitialized();
  if (ours) launch(folder ? *folder : default_environment());
  in_python(any_epoch, [&] {
    const std::string prefix = running_environment();
    std::error_code ignored;
    if (folder && !std::filesystem::equivalent(prefix, *folder, ignored))
      throw interpreter_error("this process runs Python in " + prefix + " already, not in " + folder->string() +
                              ": call kvrelay::start() before anything else, once");
    if (!state.started) import_package(state, ours);
  });
  if (!state.started) {
    pin_libraries();
    // A child has no thread but the one that forked it: what waits for the others, or for the GIL, would hang there.
    pthread_atfork(nullptr, nullptr, [] { State::get().forked = true; });
  }
  state.started = true;
  stop_at_exit();
}

}  // namespace kvrelay::detail

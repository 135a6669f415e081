#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>

#include "detail/convert.hpp"
#include "detail/start.hpp"
#include "result.hpp"

namespace kvrelay {

/// Starts the interpreter in the Python environment `folder`, where kvrelay is installed. Without this call it starts
/// when it is first needed, in the environment that CMake found kvrelay in. Where the host runs an interpreter already,
/// that one is used.
inline void start(const std::filesystem::path& folder) { detail::start(folder); }

/// Ends all work: requests, engines and their threads. Calls that other threads have in progress, and any later use of
/// what was made before, throw Error (shutdown). Returns when nothing of this library runs any more; a callback that is
/// running is not waited for. The interpreter goes on: what is made afterwards works as before.
inline void shutdown() {
  detail::State& state = detail::State::get();
  if (!state.started || state.lost()) return;
  state.refuse(detail::any_epoch);
  detail::stop(state, false, std::nullopt);
}

/// Sets the thread count of the process on first use and returns the count in force; none: all CPUs, at first.
inline std::int64_t use_threads(std::optional<std::int64_t> threads = std::nullopt) {
  detail::start();
  return detail::in_python(detail::any_epoch, [&] {
    const pybind11::handle package = detail::State::get().package;
    return package.attr("use_threads")(threads ? pybind11::cast(*threads) : pybind11::none()).cast<std::int64_t>();
  });
}

inline Receipt read_receipt(const std::filesystem::path& path) {
  detail::start();
  return detail::in_python(detail::any_epoch, [&] {
    const pybind11::object file = pybind11::module_::import("pathlib").attr("Path")(detail::path_of(path));
    return detail::receipt_of(pybind11::handle(detail::State::get().package).attr("read_receipt")(file));
  });
}

inline void Receipt::save(const std::filesystem::path& path) const {
  std::ofstream file(path, std::ios::binary);
  file << json << '\n';
  file.close();
  if (!file) throw Error(ErrorKind::python, "OSError", path.string() + " cannot be written");
}

}  // namespace kvrelay

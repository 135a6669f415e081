#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace kvrelay {

/// What went wrong. The first eleven are the classes of kvrelay.errors in Python.
enum class ErrorKind {
  backend_missing,  // no engine backend is installed
  bundle,           // a bundle is missing, damaged, or of another version
  cache_directory,  // the box's cache cannot be written
  cuda,             // a call of CUDA failed, or there is no GPU
  engine,           // an engine failed, or the Engine is closed
  exactness,        // this box cannot keep the promise that was asked for
  memory_budget,    // the KV cache does not fit in memory
  parameter,        // a parameter is unknown, out of range, or contradicts another
  plan,             // a TensorRT plan cannot be built, is missing or damaged, or is for another version or GPU
  prompt,           // a prompt is empty, too long, or malformed
  thread_count,     // the process already runs its engines with another number of threads
  kvrelay,          // another KvrelayError; type() names it
  interpreter,      // Python cannot be started or used here, or lacks kvrelay
  shutdown,         // kvrelay::shutdown() was called while, or before, this object was used
  timeout,          // the request has not ended yet
  python,           // any other Python exception; type() names it
};

/// Every error of this library. It holds plain text, so it may be caught, kept and destroyed on any thread.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, std::string type, const std::string& message)
      : std::runtime_error(message), kind_(kind), type_(std::move(type)) {}

  ErrorKind kind() const noexcept { return kind_; }

  /// The name of the Python class, such as "ParameterError"; empty where no Python exception was behind it.
  const std::string& type() const noexcept { return type_; }

 private:
  ErrorKind kind_;
  std::string type_;
};

}  // namespace kvrelay

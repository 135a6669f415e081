#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "../options.hpp"
#include "../result.hpp"
#include "call.hpp"

// Values on their way between C++ and Python. The GIL is held in all of these functions.
namespace kvrelay::detail {

/// Returns text as Python's; text that is not UTF-8 is the caller's error.
inline py::str text_of(std::string_view text, const char* what, ErrorKind kind) {
  PyObject* made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
  if (made != nullptr) return py::reinterpret_steal<py::str>(made);
  py::error_already_set error;
  throw Error(kind, "UnicodeDecodeError", std::string(what) + " is not UTF-8: " + error.what());
}

inline py::object path_of(const std::filesystem::path& path) {
  const std::string& name = path.native();
  PyObject* made = PyUnicode_DecodeFSDefaultAndSize(name.data(), static_cast<Py_ssize_t>(name.size()));
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

/// Keyword arguments from the fields of an options struct; empty optionals are left out, so Python's default holds.
class Arguments {
 public:
  template <class Struct>
  explicit Arguments(const Struct& fields) {
    Struct::visit(fields, *this);
  }

  void operator()(const char* name, const std::string& value) {
    made[name] = text_of(value, name, ErrorKind::parameter);
  }
  void operator()(const char* name, const std::vector<std::string>& values) {
    py::list list;
    for (const std::string& value : values) list.append(text_of(value, name, ErrorKind::parameter));
    made[name] = list;
  }
  void operator()(const char* name, const Faults& faults) {
    made[name] = py::handle(State::get().package).attr("Faults")(**Arguments(faults).made);
  }
  template <class Value>
  std::enable_if_t<std::is_arithmetic_v<Value>> operator()(const char* name, Value value) {
    made[name] = py::cast(value);
  }
  template <class Value>
  void operator()(const char* name, const std::optional<Value>& value) {
    if (value) (*this)(name, *value);
  }

  py::dict made;
};

/// A prompt in Python, for the length of one call: token ids are seen there in the memory where they lie.
class PromptArgument {
 public:
  explicit PromptArgument(const Prompt& prompt) {
    std::visit([this](const auto& value) { take(value); }, prompt.value());
  }
  ~PromptArgument() {
    // Whatever still holds the view, such as an exception's frame, must not reach into the caller's memory later.
    if (!view_) return;
    try {
      object.attr("release")();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("kvrelay: the view of a prompt");
    }
  }
  PromptArgument(const PromptArgument&) = delete;
  PromptArgument& operator=(const PromptArgument&) = delete;

  py::object object;

 private:
  void take(const std::string& text) { object = text_of(text, "the prompt", ErrorKind::prompt); }
  void take(const std::vector<Message>& chat) {
    py::list messages;
    for (const Message& message : chat) {
      py::dict turn;
      turn["role"] = text_of(message.role, "a message's role", ErrorKind::prompt);
      turn["content"] = text_of(message.content, "a message", ErrorKind::prompt);
      messages.append(turn);
    }
    object = messages;
  }
  void take(const std::vector<std::int64_t>& ids) { take(TokenIds(ids.data(), ids.size())); }
  void take(TokenIds ids) {
    static constexpr std::int64_t nothing = 0;
    const std::int64_t* data = ids.size() == 0 ? &nothing : ids.data();
    object = py::memoryview::from_buffer(data, {static_cast<py::ssize_t>(ids.size())}, {sizeof(std::int64_t)});
    view_ = true;
  }

  bool view_ = false;
};

inline void read(py::handle value, std::string& to) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
  if (data == nullptr) throw py::error_already_set();
  to.assign(data, static_cast<std::size_t>(size));
}

inline void read(py::handle value, std::int64_t& to) {
  to = PyLong_AsLongLong(value.ptr());
  if (to == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
}

inline void read(py::handle value, std::uint64_t& to) {
  to = PyLong_AsUnsignedLongLong(value.ptr());
  if (to == UINT64_MAX && PyErr_Occurred() != nullptr) throw py::error_already_set();
}

inline void read(py::handle value, double& to) {
  to = PyFloat_AsDouble(value.ptr());
  if (to == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
}

inline void read(py::handle value, bool& to) { to = value.cast<bool>(); }

template <class Value>
void read(py::handle value, std::optional<Value>& to) {
  if (value.is_none()) return to.reset();
  read(value, to.emplace());
}

template <class Value>
void read(py::handle value, std::vector<Value>& to) {
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(value.ptr(), "a list is needed"));
  if (!items) throw py::error_already_set();
  to.resize(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items.ptr())));
  for (std::size_t i = 0; i < to.size(); ++i)
    read(PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)), to[i]);
}

/// Reads a dictionary's entry, if it is there.
struct Entries {
  py::dict from;
  template <class Value>
  void operator()(const char* name, Value& to) const {
    if (from.contains(name)) read(from[name], to);
  }
};

/// Reads an object's attributes.
struct Attributes {
  py::handle from;
  template <class Value>
  void operator()(const char* name, Value& to) const {
    read(from.attr(name), to);
  }
};

inline Receipt receipt_of(py::handle receipt) {
  Receipt made;
  const Attributes attribute{receipt};
  attribute("bundle", made.bundle);
  attribute("group", made.group);
  attribute("window", made.window);
  attribute("prompt_ids", made.prompt_ids);
  attribute("finish_reason", made.finish_reason);
  attribute("tokens", made.tokens);
  attribute("digest", made.digest);
  Options::visit(made.options, Entries{receipt.attr("options")});
  made.options.deterministic = true;
  read(receipt.attr("conditions").attr("model_dump_json")(), made.conditions);
  read(receipt.attr("model_dump_json")(py::arg("indent") = 1), made.json);
  return made;
}

inline Result result_of(py::handle result) {
  Result made;
  const Attributes attribute{result};
  attribute("text", made.text);
  attribute("token_ids", made.token_ids);
  attribute("scores", made.scores);
  attribute("finish_reason", made.finish_reason);
  attribute("seed", made.seed);
  Stats::visit(made.stats, Attributes{result.attr("stats")});
  const py::object receipt = result.attr("receipt");
  if (!receipt.is_none()) made.receipt = receipt_of(receipt);
  return made;
}

inline TraceEvent event_of(const py::dict& event) {
  TraceEvent made;
  const Entries entry{event};
  entry("pass", made.pass);
  if (event.contains("draft") && !event["draft"].is_none()) entry("draft", made.draft);
  entry("window", made.window);
  entry("drafted", made.drafted);
  entry("accepted", made.accepted);
  entry("committed", made.committed);
  entry("ends_with", made.ends_with);
  const py::object length = event["kv_length"];
  if (!py::isinstance<py::dict>(length)) {
    read(length, made.kv_before);
    made.kv_written = made.kv_after_rollback = made.kv_before;
    return made;
  }
  const Entries lengths{length};
  lengths("before", made.kv_before);
  lengths("written", made.kv_written);
  lengths("after_rollback", made.kv_after_rollback);
  return made;
}

}  // namespace kvrelay::detail

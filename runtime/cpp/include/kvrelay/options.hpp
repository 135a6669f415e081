#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "error.hpp"

namespace kvrelay {

/// One turn of a chat.
struct Message {
  std::string role;
  std::string content;
};

/// Memory of somebody else: it must stay where it is for as long as the view is used.
template <class T>
class View {
 public:
  constexpr View(const T* data, std::size_t size) noexcept : data_(data), size_(size) {}

  constexpr const T* data() const noexcept { return data_; }
  constexpr std::size_t size() const noexcept { return size_; }
  constexpr const T* begin() const noexcept { return data_; }
  constexpr const T* end() const noexcept { return data_ + size_; }
  constexpr const T& operator[](std::size_t i) const noexcept { return data_[i]; }

 private:
  const T* data_;
  std::size_t size_;
};

using TokenIds = View<std::int64_t>;

/// Text (taken as it is), chat messages (put through the chat template), or token ids.
///
/// Text is UTF-8. `generate("Once")` is text, `generate({{"user", "Why?"}})` a chat, `generate({1, 2, 3})` are ids.
/// Given as TokenIds, ids are read where they lie and must stay there until the call returns.
class Prompt {
 public:
  Prompt(const char* text) : value_(std::string(not_null(text))) {}
  Prompt(std::string_view text) : value_(std::string(text)) {}
  Prompt(std::string text) : value_(std::move(text)) {}
  Prompt(std::vector<Message> chat) : value_(std::move(chat)) {}
  Prompt(std::initializer_list<Message> chat) : value_(std::vector<Message>(chat)) {}
  Prompt(std::vector<std::int64_t> ids) : value_(std::move(ids)) {}
  Prompt(std::initializer_list<std::int64_t> ids) : value_(std::vector<std::int64_t>(ids)) {}
  Prompt(TokenIds ids) : value_(ids) {}

  using Value = std::variant<std::string, std::vector<Message>, std::vector<std::int64_t>, TokenIds>;
  const Value& value() const noexcept { return value_; }

 private:
  static const char* not_null(const char* text) {
    if (text == nullptr) throw Error(ErrorKind::prompt, "", "the prompt is a null pointer");
    return text;
  }

  Value value_;
};

/// What happened in one window of a Pipeline; lists hold token ids.
struct TraceEvent {
  std::string pass;                   // "prefill", "verify" or "plain"
  std::string draft;                  // empty without one
  std::int64_t window = 0;            // of a prefill: 0
  std::vector<std::int64_t> drafted;
  std::vector<std::int64_t> accepted;
  std::vector<std::int64_t> committed;
  std::string ends_with;              // "correction", "bonus" or "match"; of a prefill: empty
  std::int64_t kv_before = 0;         // entries in the cache before the pass; of a prefill: after it, as the next two
  std::int64_t kv_written = 0;
  std::int64_t kv_after_rollback = 0;
};

/// How one answer is made. Every field begins at the value that it has in Python, most of which turn it off.
/// (Each names that value, the empty ones too: compilers warn of designated initialisers that leave out one without.)
struct Options {
  std::int64_t max_new_tokens = 128;
  double temperature = 0;          // 0 takes the most likely token
  std::int64_t top_k = 0;          // 0: off
  double top_p = 1;                // 1: off
  double min_p = 0;                // 0: off
  double repetition_penalty = 1;   // 1: off
  double frequency_penalty = 0;    // 0: off
  double presence_penalty = 0;     // 0: off
  std::optional<std::uint64_t> seed = {};  // none draws one, which the result records
  std::vector<std::string> stop = {};  // strings that end the text and are not part of it
  bool ignore_eos = false;
  bool deterministic = false;      // Engine only: bit-identical whatever else is served; the result has a receipt
  std::function<void(const TraceEvent&)> trace = {};  // Pipeline only: told each window, on the thread that generates

  /// Calls `visit(name, value)` for each option of Engine::submit and Pipeline::generate but the last two.
  template <class Self, class Visit>
  static void visit(Self& options, Visit&& visit) {
    visit("max_new_tokens", options.max_new_tokens);
    visit("temperature", options.temperature);
    visit("top_k", options.top_k);
    visit("top_p", options.top_p);
    visit("min_p", options.min_p);
    visit("repetition_penalty", options.repetition_penalty);
    visit("frequency_penalty", options.frequency_penalty);
    visit("presence_penalty", options.presence_penalty);
    visit("seed", options.seed);
    visit("stop", options.stop);
    visit("ignore_eos", options.ignore_eos);
  }
};

/// Told what takes long on first use, while a Pipeline or Engine is made, on the thread that makes it.
using Progress = std::function<void(std::string_view)>;

/// How a bundle is opened by a Pipeline; fields and defaults as in Python.
struct PipelineOptions {
  std::string draft = "auto";
  std::optional<std::int64_t> window = {};  // none: costs decide
  std::optional<std::string> precision = {};  // none: the bundle's first
  std::optional<std::int64_t> threads = {};  // of the process; none: the count in force
  bool exact = true;
  std::string backend = "onnxruntime";   // or "tensorrt", "tensorrt-rtx", which run the plans of `kvrelay build`
  std::optional<std::string> provider = {};  // of onnxruntime: "cpu", "cuda", "tensorrt", or several by commas; none: "cpu"
  std::optional<std::string> draft_backend = {};  // of drafts with an engine; both none: where the target runs
  std::optional<std::string> draft_provider = {};
  Progress progress = {};

  template <class Self, class Visit>
  static void visit(Self& options, Visit&& visit) {
    visit("draft", options.draft);
    visit("window", options.window);
    visit("precision", options.precision);
    visit("threads", options.threads);
    visit("exact", options.exact);
    visit("backend", options.backend);
    visit("provider", options.provider);
    visit("draft_backend", options.draft_backend);
    visit("draft_provider", options.draft_provider);
  }
};

/// Shares of events that are made to fail, for testing; 0 turns a kind off.
struct Faults {
  double rollback = 0;
  double engine = 0;
  double pads = 0;
  std::int64_t seed = 0;

  template <class Self, class Visit>
  static void visit(Self& faults, Visit&& visit) {
    visit("rollback", faults.rollback);
    visit("engine", faults.engine);
    visit("pads", faults.pads);
    visit("seed", faults.seed);
  }
};

/// How a bundle is opened by an Engine; fields and defaults as in Python.
struct EngineOptions {
  std::int64_t max_batch = 8;
  std::optional<std::string> precision = {};  // none: the bundle's first
  std::optional<std::int64_t> threads = {};  // of the process; none: the count in force
  std::string draft = "none";
  std::int64_t window = 16;
  std::int64_t group = 4;
  std::optional<bool> in_class = {};  // none: whichever costs less
  std::optional<Faults> faults = {};
  std::string backend = "onnxruntime";   // or "tensorrt", "tensorrt-rtx", which run the plans of `kvrelay build`
  std::optional<std::string> provider = {};  // of onnxruntime: "cpu", "cuda", "tensorrt", or several by commas; none: "cpu"
  std::optional<std::string> draft_backend = {};  // of drafts with an engine; both none: where the target runs
  std::optional<std::string> draft_provider = {};
  Progress progress = {};

  template <class Self, class Visit>
  static void visit(Self& options, Visit&& visit) {
    visit("max_batch", options.max_batch);
    visit("precision", options.precision);
    visit("threads", options.threads);
    visit("draft", options.draft);
    visit("window", options.window);
    visit("group", options.group);
    visit("in_class", options.in_class);
    visit("faults", options.faults);
    visit("backend", options.backend);
    visit("provider", options.provider);
    visit("draft_backend", options.draft_backend);
    visit("draft_provider", options.draft_provider);
  }
};

}  // namespace kvrelay

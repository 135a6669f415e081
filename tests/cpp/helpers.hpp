#pragma once

#include <kvrelay.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace helpers {

inline std::string variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) throw std::runtime_error(std::string(name) + " is not set: run the tests with pytest");
  return value;
}

inline std::string bundle() { return variable("KVRELAY_TEST_BUNDLE"); }

/// Repeats of each case: 50 in the full run.
inline int repeats() { return std::stoi(variable("KVRELAY_TEST_REPEATS")); }

/// Ends the process if it is not destroyed within 20 seconds: a deadlock.
class Watchdog {
 public:
  explicit Watchdog(const char* what) : thread_([this, what] {
    std::unique_lock<std::mutex> lock(mutex_);
    if (done_.wait_for(lock, std::chrono::seconds(20), [this] { return over_; })) return;
    std::fprintf(stderr, "DEADLOCK: %s\n", what);
    std::abort();
  }) {}
  ~Watchdog() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    done_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool over_ = false;
  std::thread thread_;
};

/// Keeps the processor busy for as long as it lives.
class Load {
 public:
  explicit Load(int threads = 2) {
    for (int i = 0; i < threads; ++i)
      threads_.emplace_back([this] {
        for (std::vector<char> noise; !over_;) noise.assign(1 << 16, 'x');
      });
  }
  ~Load() {
    over_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> over_{false};
  std::vector<std::thread> threads_;
};

inline kvrelay::PipelineOptions drafting(const std::string& draft = "cousin", int window = 8) {
  kvrelay::PipelineOptions options;
  options.draft = draft;
  options.window = window;
  options.threads = 2;
  return options;
}

inline kvrelay::PipelineOptions plain() {
  kvrelay::PipelineOptions options;
  options.draft = "none";
  options.threads = 2;
  return options;
}

inline kvrelay::EngineOptions serving() {
  kvrelay::EngineOptions options;
  options.max_batch = 4;
  options.threads = 2;
  return options;
}

inline kvrelay::Options length(int tokens) {
  kvrelay::Options options;
  options.max_new_tokens = tokens;
  options.ignore_eos = true;
  return options;
}

// Cases 0, 1, ... are the same in Python (cases.py).
inline std::vector<std::int64_t> case_prompt(int i) {
  std::vector<std::int64_t> ids;
  for (int j = 0; j < 2 + i % 9; ++j) ids.push_back((i * 37 + j * 11) % 250 + 4);
  return ids;
}

inline kvrelay::Options case_options(int i) {
  kvrelay::Options options;
  options.max_new_tokens = 16;
  options.temperature = 0.8 * (i % 2);
  options.seed = static_cast<std::uint64_t>(i);
  return options;
}

struct Reference {
  std::vector<std::int64_t> token_ids;
  std::vector<double> scores;
};

/// Python's results for the cases: a line of ids, then a line of scores as hexadecimal floats.
inline const std::vector<Reference>& references() {
  static const std::vector<Reference> all = [] {
    std::vector<Reference> read;
    std::ifstream file(variable("KVRELAY_TEST_REFERENCE"));
    for (std::string ids, scores; std::getline(file, ids) && std::getline(file, scores);) {
      Reference& next = read.emplace_back();
      std::istringstream id_words(ids), score_words(scores);
      for (std::int64_t id; id_words >> id;) next.token_ids.push_back(id);
      for (std::string word; score_words >> word;) next.scores.push_back(std::strtod(word.c_str(), nullptr));
    }
    if (read.empty()) throw std::runtime_error("the reference file is empty");
    return read;
  }();
  return all;
}

inline bool equals(const kvrelay::Result& result, const Reference& wanted) {
  return result.token_ids == wanted.token_ids && result.scores == wanted.scores;
}

}  // namespace helpers

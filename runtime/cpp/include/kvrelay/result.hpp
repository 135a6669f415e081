#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "options.hpp"
#include "stats.hpp"

namespace kvrelay {

/// What a deterministic output was made from, and its digest. A new request from `prompt_ids` and `options` under the
/// same `conditions` gives the same digest.
struct Receipt {
  std::string bundle;  // folder
  std::int64_t group = 0;
  std::int64_t window = 0;
  std::vector<std::int64_t> prompt_ids;
  Options options;         // deterministic
  std::string conditions;  // JSON: versions, device, threads, hashes of the engines; equal text, equal conditions
  std::string finish_reason;
  std::int64_t tokens = 0;
  std::string digest;  // SHA-256 over ids and scores
  std::string json;    // the whole receipt, as Python writes it

  /// Writes the receipt for `kvrelay replay` and read_receipt(). Throws Error (python, OSError).
  void save(const std::filesystem::path& path) const;
};

/// Reads a receipt that C++ or Python wrote. Throws Error (parameter).
Receipt read_receipt(const std::filesystem::path& path);

/// A finished generation: plain values that need no interpreter and belong to whoever holds them.
struct Result {
  std::string text;
  std::vector<std::int64_t> token_ids;  // the output, an end-of-sequence id at its end included
  std::vector<double> scores;           // log-probability of each output token before filters, a float32's value
  std::string finish_reason;            // "stop", "length" or "cancelled"
  std::uint64_t seed = 0;
  Stats stats;
  std::optional<Receipt> receipt;  // of a deterministic request in an Engine
  double facade_seconds = 0;       // spent in this library on the request: not in Python, not in callbacks
};

}  // namespace kvrelay

#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace kvrelay {

/// What a request did; fields, meaning and values are those of kvrelay.Stats in Python.
struct Stats {
  std::int64_t prompt_tokens = 0;
  std::int64_t reused_tokens = 0;
  std::int64_t first = 0;
  std::int64_t proposed = 0;
  std::int64_t evaluated = 0;
  std::int64_t accepted = 0;
  std::int64_t corrections = 0;
  std::int64_t bonus = 0;
  std::int64_t windows = 0;
  std::int64_t plain_passes = 0;
  std::int64_t rollbacks = 0;
  std::int64_t draft_runs = 0;
  double draft_seconds = 0;
  double verify_seconds = 0;
  double ttft = 0;
  double decode_seconds = 0;
  std::int64_t kv_bytes = 0;
  std::int64_t kv_bytes_copied = 0;
  double plain_ms = 0;
  double stored_verify_ms = 0;
  std::string policy;

  // derived
  std::int64_t emitted = 0;
  std::int64_t recomputed = 0;
  std::int64_t passes = 0;
  std::optional<double> acceptance;
  std::optional<double> tokens_per_verify;
  std::optional<double> tokens_per_second;
  std::optional<double> time_per_token;
  std::optional<double> host_share;
  std::optional<double> speedup;

  /// Calls `visit(name, value)` for each field of `stats`.
  template <class Self, class Visit>
  static void visit(Self& stats, Visit&& visit) {
    visit("prompt_tokens", stats.prompt_tokens);
    visit("reused_tokens", stats.reused_tokens);
    visit("first", stats.first);
    visit("proposed", stats.proposed);
    visit("evaluated", stats.evaluated);
    visit("accepted", stats.accepted);
    visit("corrections", stats.corrections);
    visit("bonus", stats.bonus);
    visit("windows", stats.windows);
    visit("plain_passes", stats.plain_passes);
    visit("rollbacks", stats.rollbacks);
    visit("draft_runs", stats.draft_runs);
    visit("draft_seconds", stats.draft_seconds);
    visit("verify_seconds", stats.verify_seconds);
    visit("ttft", stats.ttft);
    visit("decode_seconds", stats.decode_seconds);
    visit("kv_bytes", stats.kv_bytes);
    visit("kv_bytes_copied", stats.kv_bytes_copied);
    visit("plain_ms", stats.plain_ms);
    visit("stored_verify_ms", stats.stored_verify_ms);
    visit("policy", stats.policy);
    visit("emitted", stats.emitted);
    visit("recomputed", stats.recomputed);
    visit("passes", stats.passes);
    visit("acceptance", stats.acceptance);
    visit("tokens_per_verify", stats.tokens_per_verify);
    visit("tokens_per_second", stats.tokens_per_second);
    visit("time_per_token", stats.time_per_token);
    visit("host_share", stats.host_share);
    visit("speedup", stats.speedup);
  }
};

/// What an engine did since it was made; fields, meaning and values are those of kvrelay.EngineStats in Python.
struct EngineStats {
  std::int64_t submitted = 0;
  std::int64_t finished = 0;
  std::int64_t cancelled = 0;
  std::int64_t failed = 0;
  std::int64_t emitted = 0;
  std::int64_t reused_tokens = 0;
  std::int64_t steps = 0;
  std::int64_t step_rows = 0;
  std::int64_t replays = 0;
  std::int64_t windows = 0;
  std::int64_t group_places = 0;
  std::int64_t rollbacks = 0;
  std::int64_t recomputed = 0;
  std::int64_t drafted = 0;
  std::int64_t accepted = 0;
  std::int64_t draft_failures = 0;
  std::int64_t kv_bytes_moved = 0;
  std::int64_t kv_bytes_copied = 0;
  double seconds = 0;
  double prefill_seconds = 0;
  double step_seconds = 0;
  double replay_seconds = 0;

  // derived
  std::optional<double> group_fill;
  std::optional<double> verify_share;
  std::optional<double> recomputed_share;
  std::optional<double> batch_fill;
  std::optional<double> tokens_per_second;

  /// Calls `visit(name, value)` for each field of `stats`.
  template <class Self, class Visit>
  static void visit(Self& stats, Visit&& visit) {
    visit("submitted", stats.submitted);
    visit("finished", stats.finished);
    visit("cancelled", stats.cancelled);
    visit("failed", stats.failed);
    visit("emitted", stats.emitted);
    visit("reused_tokens", stats.reused_tokens);
    visit("steps", stats.steps);
    visit("step_rows", stats.step_rows);
    visit("replays", stats.replays);
    visit("windows", stats.windows);
    visit("group_places", stats.group_places);
    visit("rollbacks", stats.rollbacks);
    visit("recomputed", stats.recomputed);
    visit("drafted", stats.drafted);
    visit("accepted", stats.accepted);
    visit("draft_failures", stats.draft_failures);
    visit("kv_bytes_moved", stats.kv_bytes_moved);
    visit("kv_bytes_copied", stats.kv_bytes_copied);
    visit("seconds", stats.seconds);
    visit("prefill_seconds", stats.prefill_seconds);
    visit("step_seconds", stats.step_seconds);
    visit("replay_seconds", stats.replay_seconds);
    visit("group_fill", stats.group_fill);
    visit("verify_share", stats.verify_share);
    visit("recomputed_share", stats.recomputed_share);
    visit("batch_fill", stats.batch_fill);
    visit("tokens_per_second", stats.tokens_per_second);
  }
};

}  // namespace kvrelay

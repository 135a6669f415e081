// Everything that the Python API has, from C++.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "helpers.hpp"

using namespace helpers;

namespace {

std::optional<kvrelay::Error> error_of(const std::function<void()>& code) {
  try {
    code();
  } catch (const kvrelay::Error& error) {
    return error;
  }
  return std::nullopt;
}

bool contains(const char* text, const char* part) { return std::strstr(text, part) != nullptr; }

void check_error(const std::function<void()>& code, kvrelay::ErrorKind kind, const char* type, const char* part) {
  const std::optional<kvrelay::Error> error = error_of(code);
  REQUIRE(error);
  INFO(error->what());
  CHECK(error->kind() == kind);
  CHECK(error->type() == type);
  CHECK(contains(error->what(), part));
}

}  // namespace

TEST_CASE("the callback, pulling and iterating give the same text") {
  const kvrelay::Pipeline pipe(bundle(), drafting());
  const kvrelay::Engine engine(bundle(), serving());
  std::string called, pulled, iterated, served;
  const kvrelay::Result result =
      pipe.generate("hello", length(50), [&](std::string_view piece) { called += piece; });
  kvrelay::Request pulling = pipe.stream("hello", length(50));
  while (const auto piece = pulling.next()) {
    CHECK(!piece->empty());
    pulled += *piece;
  }
  CHECK(!pulling.next());
  kvrelay::Request iterating = pipe.stream("hello", length(50));
  for (const std::string& piece : iterating) iterated += piece;
  kvrelay::Options options = length(50);
  options.deterministic = true;
  kvrelay::Request serving_request = engine.submit("hello", options);
  for (const std::string& piece : serving_request) served += piece;
  CHECK(result.token_ids.size() == 50);
  CHECK(result.finish_reason == "length");
  for (const std::string* text : {&called, &pulled, &iterated, &served}) CHECK(*text == result.text);
  CHECK(pulling.result().token_ids == result.token_ids);
  CHECK(pulling.result().scores == result.scores);
  CHECK(serving_request.result().scores == result.scores);
  CHECK(result.facade_seconds > 0);
  CHECK(result.facade_seconds < result.stats.ttft + result.stats.decode_seconds);
}

TEST_CASE("a prompt is text, chat messages or token ids, and ids may lie in memory of the caller") {
  const kvrelay::Pipeline pipe(bundle(), plain());
  const std::string text = "h\xC3\xA9llo";
  const std::vector<std::int64_t> ids = pipe.encode(text);
  CHECK(ids.size() == 6);  // bytes
  std::int64_t memory[6];
  std::copy(ids.begin(), ids.end(), memory);
  const kvrelay::Result wanted = pipe.generate(text, length(10));
  CHECK(pipe.generate(ids, length(10)).token_ids == wanted.token_ids);
  kvrelay::Request request = pipe.stream(kvrelay::TokenIds(memory, 6), length(10));
  std::fill(memory, memory + 6, -1);  // read already
  CHECK(request.result().token_ids == wanted.token_ids);
  CHECK(pipe.encode({{"user", "hello"}}) == pipe.encode("<|user|>hello\n<|assistant|>"));
  CHECK(pipe.encode({{"system", "be brief"}, {"user", "hello"}}).size() > pipe.encode({{"user", "hello"}}).size());
  CHECK(pipe.encode({5, 6, 7}) == std::vector<std::int64_t>{5, 6, 7});
  CHECK(pipe.encode(std::string_view("a\0b", 3)).size() == 3);
}

TEST_CASE("logits stay in Python's memory for as long as they are held, and lead to the greedy token") {
  std::optional<kvrelay::Logits> logits;
  const kvrelay::Result result = [&] {
    const kvrelay::Pipeline pipe(bundle(), plain());
    logits.emplace(pipe.logits("hello"));
    CHECK_THROWS_AS(pipe.logits({99999}), kvrelay::Error);
    return pipe.generate("hello", length(1));
  }();
  const std::vector<float> before(logits->begin(), logits->end());
  CHECK(logits->size() == 260);
  CHECK(std::max_element(before.begin(), before.end()) - before.begin() == result.token_ids[0]);
  double sum = 0;
  for (float value : before) sum += std::exp(static_cast<double>(value));
  const auto chosen = static_cast<std::size_t>(result.token_ids[0]);
  CHECK(before[chosen] - std::log(sum) == doctest::Approx(result.scores[0]).epsilon(1e-5));
  const kvrelay::Pipeline other(bundle(), plain());
  other.generate("something else", length(40));
  CHECK(std::equal(before.begin(), before.end(), logits->data()));
  std::thread([&] { logits.reset(); }).join();
}

TEST_CASE("options reach Python: seed, temperature, stop strings, penalties, end of sequence") {
  const kvrelay::Pipeline pipe(bundle(), plain());
  kvrelay::Options options = length(30);
  options.temperature = 1.2;
  options.top_k = 40;
  options.top_p = 0.95;
  options.min_p = 0.001;
  options.repetition_penalty = 1.1;
  options.frequency_penalty = 0.1;
  options.presence_penalty = 0.1;
  options.seed = UINT64_MAX;
  const kvrelay::Result first = pipe.generate("hello", options);
  CHECK(first.seed == UINT64_MAX);
  CHECK(pipe.generate("hello", options).token_ids == first.token_ids);
  options.seed = 1;
  CHECK(pipe.generate("hello", options).token_ids != first.token_ids);
  options.seed.reset();
  const kvrelay::Result drawn = pipe.generate("hello", options);
  options.seed = drawn.seed;
  CHECK(pipe.generate("hello", options).token_ids == drawn.token_ids);

  const kvrelay::Result greedy = pipe.generate("hello", length(30));
  kvrelay::Options stopping = length(30);
  const auto whole = [&](std::size_t at) {  // the next place where a character of UTF-8 begins
    while (at < greedy.text.size() && (greedy.text[at] & 0xC0) == 0x80) ++at;
    return at;
  };
  const std::size_t middle = whole(greedy.text.size() / 2);
  stopping.stop = {"never there", greedy.text.substr(middle, whole(middle + 2) - middle)};
  const kvrelay::Result stopped = pipe.generate("hello", stopping);
  CHECK(stopped.finish_reason == "stop");
  CHECK(stopped.text == greedy.text.substr(0, greedy.text.find(stopping.stop[1])));
}

TEST_CASE("deterministic requests have receipts, from which they can be made again") {
  const kvrelay::Engine engine(bundle(), serving());
  kvrelay::Options options = case_options(3);
  options.deterministic = true;
  options.stop = {"\xC3\xA9"};
  const kvrelay::Result result = engine.submit(case_prompt(3), options).result();
  REQUIRE(result.receipt);
  CHECK(result.receipt->conditions == engine.conditions());
  CHECK(result.receipt->prompt_ids == case_prompt(3));
  CHECK(result.receipt->tokens == static_cast<std::int64_t>(result.token_ids.size()));

  const std::filesystem::path file = std::filesystem::temp_directory_path() / "kvrelay-receipt.json";
  result.receipt->save(file);
  const kvrelay::Receipt read = kvrelay::read_receipt(file);
  std::filesystem::remove(file);
  CHECK(read.json == result.receipt->json);
  const kvrelay::Result again = engine.submit(read.prompt_ids, read.options).result();
  REQUIRE(again.receipt);
  CHECK(again.receipt->digest == result.receipt->digest);
  CHECK(!engine.submit(case_prompt(3), case_options(3)).result().receipt);
  CHECK_THROWS_AS(result.receipt->save("/no such folder/receipt.json"), kvrelay::Error);
  check_error([] { kvrelay::read_receipt("/no such file"); }, kvrelay::ErrorKind::parameter, "ParameterError",
              "cannot be read");
}

TEST_CASE("an engine's statistics obey the identities, and a timed wait says whether the request has ended") {
  kvrelay::EngineOptions options = serving();
  options.faults = kvrelay::Faults{0.5, 0, 0, 3};
  options.in_class = false;
  const kvrelay::Engine engine(bundle(), options);
  CHECK(engine.max_batch() == 4);
  CHECK(engine.kv_bytes() > 0);
  CHECK(engine.threads() == 2);
  CHECK(engine.precision() == "fp32");
  kvrelay::Options deterministic = case_options(6);
  deterministic.deterministic = true;
  kvrelay::Request request = engine.submit(case_prompt(6), deterministic);
  CHECK(request.wait_for(std::chrono::hours::max()));
  CHECK(request.done());
  CHECK(equals(request.result(), references()[6]));
  kvrelay::Request ordinary = engine.submit(case_prompt(0), length(250));
  CHECK(!ordinary.wait_for(std::chrono::milliseconds(1)));
  CHECK(!ordinary.done());
  ordinary.cancel();
  ordinary.result();
  const kvrelay::EngineStats stats = engine.stats();
  CHECK(stats.submitted == 2);
  CHECK(stats.finished == 1);
  CHECK(stats.cancelled == 1);
  CHECK(stats.replays > 0);
  CHECK(stats.rollbacks > 0);
  CHECK(stats.group_fill.value_or(0) > 0);
  CHECK(stats.batch_fill.value_or(0) >= 1);
}

TEST_CASE("a request that fails says why, through each way of reading it") {
  kvrelay::EngineOptions options = serving();
  options.faults = kvrelay::Faults{0, 1, 0, 0};
  const kvrelay::Engine engine(bundle(), options);
  const auto failing = [&] { return engine.submit({50, 60, 70}, length(20)); };
  const auto check = [](const std::function<void()>& code) {
    check_error(code, kvrelay::ErrorKind::engine, "EngineError", "injected fault");
  };
  check([&] { failing().result(); });
  check([&] { failing().stream([](std::string_view) {}); });
  check([&] {
    kvrelay::Request request = failing();
    while (request.next()) {
    }
  });
  kvrelay::Request request = failing();
  CHECK(request.wait_for(std::chrono::seconds(20)));
}

TEST_CASE("what is wrong is refused with Python's words and a kind") {
  using Kind = kvrelay::ErrorKind;
  check_error([] { kvrelay::Pipeline("no such bundle"); }, Kind::bundle, "BundleError", "the folder does not exist");
  const kvrelay::Pipeline pipe(bundle(), plain());
  const kvrelay::Engine engine(bundle(), serving());
  kvrelay::Options options;
  options.temperature = -1;
  check_error([&] { pipe.generate("x", options); }, Kind::parameter, "ParameterError", "temperature=-1.0: 0 (greedy)");
  check_error([&] { (void)engine.submit("x", options); }, Kind::parameter, "ParameterError", "temperature=-1.0");
  check_error([&] { engine.check("x", options); }, Kind::parameter, "ParameterError", "temperature=-1.0");
  options = {};
  options.max_new_tokens = 0;
  check_error([&] { pipe.generate("x", options); }, Kind::parameter, "ParameterError", "max_new_tokens=0");
  options = {};
  options.stop = {""};
  check_error([&] { pipe.generate("x", options); }, Kind::parameter, "ParameterError", "at least one character");
  options.stop = {"\xFF"};
  check_error([&] { pipe.generate("x", options); }, Kind::parameter, "UnicodeDecodeError", "stop is not UTF-8");
  options = {};
  options.deterministic = true;
  check_error([&] { pipe.generate("x", options); }, Kind::parameter, "", "Engine::submit()");
  options = {};
  options.trace = [](const kvrelay::TraceEvent&) {};
  check_error([&] { (void)engine.submit("x", options); }, Kind::parameter, "", "Pipeline::generate()");
  check_error([&] { pipe.generate("caf\xE9"); }, Kind::prompt, "UnicodeDecodeError", "not UTF-8");
  check_error([&] { pipe.generate(std::vector<std::int64_t>{}); }, Kind::prompt, "PromptError", "no tokens");
  check_error([&] { pipe.generate({1, 2, 99999}); }, Kind::prompt, "PromptError", "prompt[2] is 99999");
  check_error([&] { pipe.generate(std::vector<std::int64_t>(300, 5)); }, Kind::prompt, "PromptError", "the context is 256");
  check_error([&] { pipe.generate({{"user", "caf\xE9"}}); }, Kind::prompt, "UnicodeDecodeError", "not UTF-8");
  check_error([&] { kvrelay::use_threads(1); }, Kind::thread_count, "ThreadCountError", "2 thread");
  CHECK(kvrelay::use_threads() == 2);
  check_error([&] { kvrelay::Pipeline(bundle(), drafting("unknown")); }, Kind::parameter, "ParameterError", "unknown");
  check_error([&] { kvrelay::Pipeline(bundle(), drafting("cousin", 3)); }, Kind::parameter, "ParameterError", "window=3");
  check_error([&] { (void)pipe.stream("x").wait_for(std::chrono::seconds(1)); }, Kind::parameter, "", "next()");
  check_error([&] { kvrelay::start("/tmp"); }, Kind::interpreter, "", "already");
  check_error([] { kvrelay::Pipeline("no \xE9"); }, Kind::bundle, "BundleError", "no \\udce9");
  check_error([&] { pipe.generate(static_cast<const char*>(nullptr)); }, Kind::prompt, "", "null pointer");
  kvrelay::Engine closed(bundle(), serving());
  closed.close();
  check_error([&] { (void)closed.submit("x"); }, Kind::engine, "EngineError", "this engine is closed");
}

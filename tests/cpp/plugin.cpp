// What a plug-in of some host is: a shared library with a C interface.

#include <kvrelay.hpp>

#include <cstdio>
#include <thread>

extern "C" {

/// Generates on this thread and on another one at once; returns the number of tokens, negative for an error.
int plugin_generate(const char* bundle) {
  try {
    kvrelay::PipelineOptions options;
    options.draft = "none";
    options.threads = 2;
    const kvrelay::Pipeline pipe(bundle, options);
    kvrelay::Options short_answer;
    short_answer.max_new_tokens = 10;
    short_answer.ignore_eos = true;
    std::size_t tokens = 0, other = 0;
    std::thread thread([&] { other = pipe.generate("hello", short_answer).token_ids.size(); });
    tokens = pipe.generate("hello", short_answer, [](std::string_view) {}).token_ids.size();
    thread.join();
    return static_cast<int>(tokens + other);
  } catch (const kvrelay::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return -1 - static_cast<int>(error.kind());
  }
}

void plugin_shutdown() { kvrelay::shutdown(); }
}

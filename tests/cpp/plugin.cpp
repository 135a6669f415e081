// What a plug-in of some host is: a shared library with a C interface.

#include <kvrelay.hpp>

#include <cstdio>

extern "C" {

/// Generates on this thread, which may hold the GIL; returns the number of tokens, negative for an error.
int plugin_generate(const char* bundle) {
  try {
    kvrelay::PipelineOptions options;
    options.draft = "none";
    options.threads = 2;
    const kvrelay::Pipeline pipe(bundle, options);
    kvrelay::Options short_answer;
    short_answer.max_new_tokens = 10;
    short_answer.ignore_eos = true;
    return static_cast<int>(pipe.generate("hello", short_answer, [](std::string_view) {}).token_ids.size());
  } catch (const kvrelay::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return -1 - static_cast<int>(error.kind());
  }
}

/// Returns 0, or a negative number for an error.
int plugin_start(const char* environment) {
  try {
    kvrelay::start(environment);
    return 0;
  } catch (const kvrelay::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return -1 - static_cast<int>(error.kind());
  }
}

void plugin_shutdown() { kvrelay::shutdown(); }
}

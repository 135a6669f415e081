// A chat in the terminal: an empty line or Ctrl-D ends it, Ctrl-C stops an answer.
//   chat BUNDLE [SYSTEM MESSAGE]

#include <kvrelay.hpp>

#include <csignal>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

namespace {

volatile std::sig_atomic_t interrupted = 0;

int chat(const std::string& bundle, std::vector<kvrelay::Message> messages) {
  kvrelay::PipelineOptions opening;
  opening.progress = [](std::string_view text) { std::cerr << text << '\n'; };
  const kvrelay::Pipeline pipe(bundle, opening);
  kvrelay::Options options;
  options.max_new_tokens = 512;

  std::string line;
  while (std::cout << "> " << std::flush && std::getline(std::cin, line) && !line.empty()) {
    messages.push_back({"user", line});
    interrupted = 0;
    const kvrelay::Result result =
        pipe.generate(messages, options, [](std::string_view piece, kvrelay::Request& request) {
          std::cout << piece << std::flush;
          if (interrupted) request.cancel();
        });
    std::cout << '\n';
    messages.push_back({"assistant", result.text});
    std::fprintf(stderr, "[%zu tokens, %.1f tokens/s, %lld of %lld prompt tokens reused]\n", result.token_ids.size(),
                 result.stats.tokens_per_second.value_or(0), static_cast<long long>(result.stats.reused_tokens),
                 static_cast<long long>(result.stats.prompt_tokens));
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::cerr << "usage: chat BUNDLE [SYSTEM MESSAGE]\n";
    return 2;
  }
  std::signal(SIGINT, [](int) { interrupted = 1; });  // a handler does no more than this
  try {
    return chat(arguments[1], count > 2 ? std::vector<kvrelay::Message>{{"system", arguments[2]}}
                                        : std::vector<kvrelay::Message>{});
  } catch (const kvrelay::Error& error) {
    std::cerr << "chat: " << error.what() << '\n';
    return 2;
  }
}

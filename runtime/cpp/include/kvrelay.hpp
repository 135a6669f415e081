#pragma once

/// kvrelay in C++17: draft-verify decoding, by way of the Python runtime, which runs inside this process.
///
///   kvrelay::Pipeline pipe("engines/smollm2-135m-instruct");
///   pipe.generate("Once upon a time", {}, [](std::string_view piece) { std::cout << piece << std::flush; });
///
/// The interpreter starts with the first Pipeline or Engine and is never ended. Every function may be called from any
/// thread and throws kvrelay::Error.

#include "kvrelay/engine.hpp"
#include "kvrelay/error.hpp"
#include "kvrelay/logits.hpp"
#include "kvrelay/options.hpp"
#include "kvrelay/pipeline.hpp"
#include "kvrelay/process.hpp"
#include "kvrelay/request.hpp"
#include "kvrelay/result.hpp"
#include "kvrelay/stats.hpp"

// A host that knows nothing of Python and loads the plug-in privately, as games and media frameworks do.
//   plugin_host PLUGIN BUNDLE

#include <dlfcn.h>

#include <cstdio>

int main(int, char** arguments) {
  void* plugin = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  const auto generate = reinterpret_cast<int (*)(const char*)>(dlsym(plugin, "plugin_generate"));
  for (int i = 0; i < 2; ++i)
    if (generate(arguments[2]) != 10) return 1;
  dlclose(plugin);  // while its threads' work is over; the exit handler that it left must still be there
  return 0;
}

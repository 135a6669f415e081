// A host that runs an interpreter of its own, and ends it before the process ends.
//   python_host PLUGIN BUNDLE ENVIRONMENT

#include <Python.h>
#include <dlfcn.h>

#include <cstdio>
#include <string>

int main(int, char** arguments) {
  PyConfig config;
  PyConfig_InitIsolatedConfig(&config);
  const std::string program = std::string(arguments[3]) + "/bin/python3";
  PyConfig_SetBytesString(&config, &config.executable, program.c_str());
  PyConfig_SetBytesString(&config, &config.program_name, program.c_str());
  if (PyStatus_Exception(Py_InitializeFromConfig(&config))) return 1;
  PyConfig_Clear(&config);
  PyRun_SimpleString("import json\nmine = {'kept': 1}");

  void* plugin = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  const auto generate = reinterpret_cast<int (*)(const char*)>(dlsym(plugin, "plugin_generate"));
  if (generate(arguments[2]) != 10) return 1;  // this thread holds the GIL all the while, as the main thread does
  if (PyGILState_Check() != 1) return 1;
  if (PyRun_SimpleString("assert mine == {'kept': 1}") != 0) return 1;
  if (Py_FinalizeEx() != 0) return 1;
  // Refused with an error, not a crash, and nothing starts the interpreter again.
  if (generate(arguments[2]) >= 0) return 1;
  if (reinterpret_cast<int (*)(const char*)>(dlsym(plugin, "plugin_start"))(arguments[3]) >= 0) return 1;
  if (Py_IsInitialized()) return 1;
  dlclose(plugin);  // the exit handler that it left must still be there
  return 7;
}

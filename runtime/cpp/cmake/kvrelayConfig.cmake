# Defines kvrelay::kvrelay: headers, pybind11::embed, and the Python environment that the program will run in.
#
# That environment is the one that this package is installed in, or the one of Python_EXECUTABLE if it is set, or an
# activated virtual environment. It must hold kvrelay[cpp] and a backend.

set(kvrelay_FOUND FALSE)

if(NOT Python_EXECUTABLE)
  # PREFIX/lib/python3.X/site-packages/kvrelay/cpp/cmake
  get_filename_component(_kvrelay_prefix "${CMAKE_CURRENT_LIST_DIR}/../../../../../.." ABSOLUTE)
  if(EXISTS "${_kvrelay_prefix}/bin/python3")
    set(Python_EXECUTABLE "${_kvrelay_prefix}/bin/python3")
  endif()
endif()
set(Python_FIND_VIRTUALENV FIRST)
find_package(Python 3.10 QUIET COMPONENTS Interpreter)
if(NOT Python_Interpreter_FOUND)
  set(kvrelay_NOT_FOUND_MESSAGE "no Python: give the environment that has kvrelay as -DPython_EXECUTABLE=ENV/bin/python")
  return()
endif()

execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import sys, sysconfig, kvrelay.cpp, pybind11; print(sys.prefix, kvrelay.cpp.cmake_directory(), pybind11.get_cmake_dir(), sysconfig.get_config_var('Py_ENABLE_SHARED'), sep=';', end='')"
  OUTPUT_VARIABLE _kvrelay_facts
  ERROR_VARIABLE _kvrelay_error
  RESULT_VARIABLE _kvrelay_result)
if(NOT _kvrelay_result EQUAL 0)
  set(kvrelay_NOT_FOUND_MESSAGE
      "${Python_EXECUTABLE} lacks kvrelay[cpp]: ${Python_EXECUTABLE} -m pip install 'kvrelay[cpp]', or give another -DPython_EXECUTABLE\n${_kvrelay_error}")
  return()
endif()
list(GET _kvrelay_facts 0 _kvrelay_environment)
list(GET _kvrelay_facts 1 _kvrelay_cmake)
list(GET _kvrelay_facts 2 _kvrelay_pybind11)
list(GET _kvrelay_facts 3 _kvrelay_shared)
get_filename_component(_kvrelay_here "${CMAKE_CURRENT_LIST_DIR}" REALPATH)
get_filename_component(_kvrelay_there "${_kvrelay_cmake}" REALPATH)
if(NOT _kvrelay_here STREQUAL _kvrelay_there)
  set(kvrelay_NOT_FOUND_MESSAGE
      "these headers are those of ${_kvrelay_here}, and ${Python_EXECUTABLE} has kvrelay with headers in ${_kvrelay_there}: give -DPython_EXECUTABLE=ENV/bin/python of the first, or -Dkvrelay_DIR of the second")
  return()
endif()
if(NOT _kvrelay_shared STREQUAL "1")
  set(kvrelay_NOT_FOUND_MESSAGE
      "${Python_EXECUTABLE} comes without a shared libpython, which embedding needs: make the environment with a Python that has it (Debian and Ubuntu: python3-dev; pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared)")
  return()
endif()

find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Embed)
if(NOT Python_Development.Embed_FOUND)
  set(kvrelay_NOT_FOUND_MESSAGE
      "the headers or the library of ${Python_EXECUTABLE} are missing (Debian and Ubuntu: apt install python3-dev)")
  return()
endif()
find_package(pybind11 3 QUIET CONFIG PATHS "${_kvrelay_pybind11}" NO_DEFAULT_PATH)
if(NOT pybind11_FOUND)
  set(kvrelay_NOT_FOUND_MESSAGE "${Python_EXECUTABLE} lacks pybind11 3: ${Python_EXECUTABLE} -m pip install 'kvrelay[cpp]'")
  return()
endif()

if(NOT TARGET kvrelay::kvrelay)
  add_library(kvrelay::kvrelay INTERFACE IMPORTED)
  get_filename_component(_kvrelay_include "${CMAKE_CURRENT_LIST_DIR}/../include" ABSOLUTE)
  set_target_properties(kvrelay::kvrelay PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${_kvrelay_include}"
    INTERFACE_COMPILE_FEATURES cxx_std_17
    INTERFACE_COMPILE_DEFINITIONS "KVRELAY_ENVIRONMENT=\"${_kvrelay_environment}\""
    INTERFACE_LINK_LIBRARIES "pybind11::embed;${CMAKE_DL_LIBS}")
endif()
set(kvrelay_FOUND TRUE)

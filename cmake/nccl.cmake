# Finds NCCL, which benchmarks are compared with: NCCL_INCLUDE_DIR and NCCL_LIBRARY.
#
# First the package that jax's CUDA wheels bring, in the site-packages of the Python that CMake
# finds (Python_EXECUTABLE chooses another), then one of the system.
find_package(Python COMPONENTS Interpreter)
set(folders "")
if(Python_EXECUTABLE)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c [[
import importlib.util
try:
    found = importlib.util.find_spec("nvidia.nccl")
except ModuleNotFoundError:
    found = None
print(*(found.submodule_search_locations if found else ()), sep=";")
]]
    OUTPUT_VARIABLE folders OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
# The wheel has the library under the name of its version alone.
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${folders} PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${folders} PATH_SUFFIXES lib)
if(NCCL_INCLUDE_DIR AND NCCL_LIBRARY)
  message(STATUS "NCCL: ${NCCL_LIBRARY}")
else()
  message(STATUS "NCCL was not found, so nccl_time is not built (pip install nvidia-nccl-cu13)")
endif()

# Makes one CUDA toolkit of the compiler packages of PyPI, for PURLIN_CUDA=13.
#
# They lie in the site-packages of the Python that builds, under a path that is new in each isolated
# build, with their libraries in lib where nvcc looks in lib64. Links from the build folder give
# nvcc the layout that it expects, under a path that stays.
if(NOT PURLIN_CUDA MATCHES "^(auto|on|off|13)$")
  message(FATAL_ERROR "PURLIN_CUDA=${PURLIN_CUDA} was given, and it can be auto, on, off or 13")
endif()
if(NOT PURLIN_CUDA STREQUAL "13")
  return()
endif()

find_package(Python REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c [[
from importlib.metadata import PackageNotFoundError, files
try:
    found = [f for f in files("nvidia-cuda-nvcc") or () if f.parts[-2:] == ("bin", "nvcc")]
    print(*[f.locate().resolve().parent.parent for f in found])
except PackageNotFoundError:
    pass
]]
  OUTPUT_VARIABLE PURLIN_PYPI_CUDA OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
foreach(file bin/nvcc nvvm/bin/cicc include/cuda_runtime.h include/crt/host_config.h
             lib/libcudart_static.a)
  if(NOT EXISTS "${PURLIN_PYPI_CUDA}/${file}")
    message(FATAL_ERROR "PURLIN_CUDA=13 was given, and ${Python_EXECUTABLE} has no package with "
      "${file} of CUDA 13. Set PURLIN_CUDA=13 in the environment of pip, which brings it; with "
      "--no-build-isolation install nvidia-cuda-cccl, nvidia-cuda-crt, nvidia-cuda-nvcc, "
      "nvidia-cuda-runtime and nvidia-nvvm before, all of them ==13.0.*")
  endif()
endforeach()

set(CUDAToolkit_ROOT ${CMAKE_CURRENT_BINARY_DIR}/cuda)
set(CMAKE_CUDA_COMPILER ${CUDAToolkit_ROOT}/bin/nvcc)
if(EXISTS "$CACHE{CMAKE_CUDA_COMPILER}"
   AND NOT "$CACHE{CMAKE_CUDA_COMPILER}" STREQUAL CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "PURLIN_CUDA=13 was given, and ${CMAKE_CURRENT_BINARY_DIR} was made with "
    "$CACHE{CMAKE_CUDA_COMPILER}. Remove that folder, and build again")
endif()
file(REMOVE_RECURSE ${CUDAToolkit_ROOT})
foreach(folder bin lib) # not links themselves: nvcc looks around the folder it is called from
  file(MAKE_DIRECTORY ${CUDAToolkit_ROOT}/${folder})
  file(GLOB files ${PURLIN_PYPI_CUDA}/${folder}/*)
  foreach(file ${files})
    get_filename_component(name ${file} NAME)
    file(CREATE_LINK ${file} ${CUDAToolkit_ROOT}/${folder}/${name} SYMBOLIC)
  endforeach()
endforeach()
foreach(folder include nvvm)
  file(CREATE_LINK ${PURLIN_PYPI_CUDA}/${folder} ${CUDAToolkit_ROOT}/${folder} SYMBOLIC)
endforeach()
file(CREATE_LINK lib ${CUDAToolkit_ROOT}/lib64 SYMBOLIC)
# CMake asks for this name, though only the static one is linked.
file(CREATE_LINK libcudart.so.13 ${CUDAToolkit_ROOT}/lib/libcudart.so SYMBOLIC)
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER}) # CXX chooses for both
endif()
set(PURLIN_CUDA on) # from here on its absence is an error
message(STATUS "CUDA compiler of PyPI: ${PURLIN_PYPI_CUDA}/bin/nvcc")

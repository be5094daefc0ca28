# The extension module `_cuda`. OTTAVA_CUDA, a CMake option or a variable of the environment, says whether it is built: `auto`
# (where an nvcc that works and a GPU are seen, for that GPU alone), `on` (for all generations, or those that CUDAARCHS names; an
# error without nvcc) or `off`. Where it is not built, OTTAVA_WITHOUT_CUDA says why, and what to do.
include(${CMAKE_CURRENT_LIST_DIR}/kernels.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/decide.cmake)
if(NOT DEFINED OTTAVA_CUDA)
  if(DEFINED ENV{OTTAVA_CUDA} AND NOT "$ENV{OTTAVA_CUDA}" STREQUAL "")
    set(OTTAVA_CUDA "$ENV{OTTAVA_CUDA}")
  else()
    set(OTTAVA_CUDA auto)
  endif()
endif()
string(TOLOWER "${OTTAVA_CUDA}" OTTAVA_CUDA)
if(NOT OTTAVA_CUDA MATCHES "^(on|off|auto)$")
  message(FATAL_ERROR "OTTAVA_CUDA is '${OTTAVA_CUDA}'; expected on, off or auto")
endif()
# No semicolons: CMake would make a list of what follows.
macro(ottava_without_cuda reason remedy)
  message(STATUS "ottava: without CUDA kernels (${reason})")
  set(OTTAVA_WITHOUT_CUDA "when it was built, ${reason}: ${remedy}")
endmacro()
set(OTTAVA_CUDA_BY_HAND "reinstall ottava from source with OTTAVA_CUDA=on")
set(OTTAVA_CUDA_NVCC "put the nvcc of CUDA 12.0 or later on PATH, or name it in CUDACXX")
if(OTTAVA_CUDA STREQUAL "off")
  ottava_without_cuda("OTTAVA_CUDA was off" "reinstall ottava from source without it, or with OTTAVA_CUDA=on")
  return()
endif()
if(OTTAVA_CUDA STREQUAL "auto")
  ottava_gpus(OTTAVA_CUDA_CAPABILITIES OTTAVA_CUDA_NO_GPU)
  if(NOT OTTAVA_CUDA_CAPABILITIES)
    # Only looked for: to have it compile something takes seconds.
    set(OTTAVA_CUDA_SEEN_NVCC "${CMAKE_CUDA_COMPILER}")
    if(NOT OTTAVA_CUDA_SEEN_NVCC)
      set(OTTAVA_CUDA_SEEN_NVCC "$ENV{CUDACXX}")
    endif()
    if(NOT OTTAVA_CUDA_SEEN_NVCC)
      # In the cache under another name: an ordinary variable of the same name would hide what is found.
      unset(OTTAVA_CUDA_NVCC_ON_PATH CACHE)
      find_program(OTTAVA_CUDA_NVCC_ON_PATH nvcc)
      set(OTTAVA_CUDA_SEEN_NVCC "${OTTAVA_CUDA_NVCC_ON_PATH}")
    endif()
    if(OTTAVA_CUDA_SEEN_NVCC AND EXISTS "${OTTAVA_CUDA_SEEN_NVCC}")
      ottava_without_cuda("${OTTAVA_CUDA_NO_GPU}" "${OTTAVA_CUDA_BY_HAND}, or where nvidia-smi sees a GPU that they take")
    else()
      ottava_without_cuda("there was no nvcc, and ${OTTAVA_CUDA_NO_GPU}" "${OTTAVA_CUDA_NVCC}, and ${OTTAVA_CUDA_BY_HAND}")
    endif()
    return()
  endif()
endif()

# Before the language is enabled: CMake would ask for a GPU otherwise.
if(DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(OTTAVA_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
elseif(DEFINED ENV{CUDAARCHS} AND NOT "$ENV{CUDAARCHS}" STREQUAL "")
  set(OTTAVA_CUDA_ARCHITECTURES $ENV{CUDAARCHS})
endif()
set(CMAKE_CUDA_ARCHITECTURES 80)
if(DEFINED CACHE{CMAKE_CUDA_COMPILER} AND NOT CMAKE_CUDA_COMPILER)
  # An earlier run in this folder found none.
  unset(CMAKE_CUDA_COMPILER CACHE)
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(OTTAVA_CUDA STREQUAL "on")
    message(FATAL_ERROR "OTTAVA_CUDA is on, but there is no nvcc that works; put it on PATH or name it in CUDACXX, "
                        "or set OTTAVA_CUDA=off for CPU kernels alone")
  endif()
  ottava_without_cuda("there was a GPU but no nvcc that works" "${OTTAVA_CUDA_NVCC}, and reinstall ottava from source")
  return()
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  if(OTTAVA_CUDA STREQUAL "on")
    message(FATAL_ERROR "OTTAVA_CUDA is on, but nvcc is of CUDA ${CMAKE_CUDA_COMPILER_VERSION}; the kernels take 12.0 or "
                        "later; name a newer one in CUDACXX, or set OTTAVA_CUDA=off for CPU kernels alone")
  endif()
  ottava_without_cuda("there was a GPU but nvcc was of CUDA ${CMAKE_CUDA_COMPILER_VERSION}"
                      "${OTTAVA_CUDA_NVCC}, and reinstall ottava from source")
  return()
endif()
if(NOT DEFINED OTTAVA_CUDA_ARCHITECTURES)
  if(OTTAVA_CUDA STREQUAL "auto")
    ottava_targets(OTTAVA_CUDA_ARCHITECTURES "${CMAKE_CUDA_COMPILER}" "${OTTAVA_CUDA_CAPABILITIES}")
  else()
    # Machine code for each generation, and PTX for those to come.
    set(OTTAVA_CUDA_ARCHITECTURES 80-real 89-real 90a-real 90-virtual)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
      list(INSERT OTTAVA_CUDA_ARCHITECTURES 3 100a-real)
    endif()
  endif()
endif()
list(JOIN OTTAVA_CUDA_ARCHITECTURES " " OTTAVA_CUDA_TARGETS)
message(STATUS "ottava: CUDA kernels for ${OTTAVA_CUDA_TARGETS}")

pybind11_add_module(_cuda MODULE NO_EXTRAS ${OTTAVA_CUDA_KERNELS} ${OTTAVA_CUDA_BINDINGS})
target_compile_features(_cuda PRIVATE cxx_std_17 cuda_std_17)
target_compile_definitions(_cuda PRIVATE OTTAVA_CUDA_MODULE=_cuda OTTAVA_CUDA_TARGETS="${OTTAVA_CUDA_TARGETS}")
target_include_directories(_cuda PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
# No contraction, no fast math: bytes are those of the CPU. The runtime is linked statically, so that the module is imported
# where no CUDA is installed, and next to any other.
target_compile_options(_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;-Xfatbin=-compress-all>"
                                     "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>")
target_link_options(_cuda PRIVATE -s)
set_target_properties(
  _cuda
  PROPERTIES CUDA_ARCHITECTURES "${OTTAVA_CUDA_ARCHITECTURES}"
             CUDA_RUNTIME_LIBRARY Static
             CXX_VISIBILITY_PRESET hidden
             CUDA_VISIBILITY_PRESET hidden)
install(TARGETS _cuda DESTINATION .)

# What the build takes the machine for: `ottava_gpus` asks for its GPUs, `ottava_targets` what to compile for them.

# Sets OUT to the compute capabilities of the GPUs here that the kernels serve, each once, and WHY_NOT to what was missing if
# there is none. nvidia-smi comes with the driver and needs no toolkit. It is asked anew each time, because a GPU may be put
# into a machine, or given to a container, after the folder of the build was made.
function(ottava_gpus OUT WHY_NOT)
  set(${OUT} "" PARENT_SCOPE)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    RESULT_VARIABLE failed
    OUTPUT_VARIABLE said
    ERROR_VARIABLE complaint
    TIMEOUT 30)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" found "${said}")
  if(NOT failed STREQUAL "0" OR NOT found)
    set(${WHY_NOT} "nvidia-smi saw no GPU" PARENT_SCOPE)
    return()
  endif()
  list(REMOVE_DUPLICATES found)
  list(SORT found COMPARE NATURAL)
  set(served ${found})
  foreach(capability IN LISTS found)
    if(capability VERSION_LESS 8.0)
      list(REMOVE_ITEM served ${capability})
    endif()
  endforeach()
  list(JOIN found " and " text)
  set(${WHY_NOT} "the GPU is of compute capability ${text} and the kernels take 8.0 or later" PARENT_SCOPE)
  set(${OUT} "${served}" PARENT_SCOPE)
endfunction()

# Sets OUT to CMake's names of the targets for these compute capabilities: machine code for each GPU that this nvcc knows, and
# PTX, which the driver compiles, for those that came after it.
function(ottava_targets OUT NVCC CAPABILITIES)
  execute_process(COMMAND ${NVCC} --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
  set(targets "")
  foreach(capability IN LISTS CAPABILITIES)
    string(REPLACE "." "" number ${capability})
    if(NOT known MATCHES "compute_${number}([^0-9]|$)")
      list(APPEND targets 90-virtual)
    elseif(capability MATCHES "^(9|10)\\.0$")
      list(APPEND targets ${number}a-real)
    else()
      list(APPEND targets ${number}-real)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES targets)
  set(${OUT} "${targets}" PARENT_SCOPE)
endfunction()

# The kernels as a static library `ottava_cpu`, used by the extension module and by the kernels' own test program.
set(OTTAVA_CPU_DIR ${CMAKE_CURRENT_LIST_DIR})
add_library(
  ottava_cpu STATIC
  ${OTTAVA_CPU_DIR}/dispatch.cpp ${OTTAVA_CPU_DIR}/operations.cpp ${OTTAVA_CPU_DIR}/multi.cpp ${OTTAVA_CPU_DIR}/grid.cpp
  ${OTTAVA_CPU_DIR}/levels.cpp ${OTTAVA_CPU_DIR}/isa_portable.cpp ${OTTAVA_CPU_DIR}/levels_portable.cpp)
target_compile_features(ottava_cpu PUBLIC cxx_std_17)
target_include_directories(ottava_cpu PUBLIC ${OTTAVA_CPU_DIR}/..)
set_target_properties(ottava_cpu PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
# A contracted multiply-add rounds once where every other backend rounds twice.
target_compile_options(ottava_cpu PRIVATE -ffp-contract=off -Wall -Wextra -Wno-psabi)

# One file per instruction set, each with its own flags: the choice is made at run time, never by -march=native.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_compile_definitions(ottava_cpu PUBLIC OTTAVA_X86)
  foreach(kind isa levels)
    target_sources(ottava_cpu PRIVATE ${OTTAVA_CPU_DIR}/${kind}_avx2.cpp ${OTTAVA_CPU_DIR}/${kind}_avx512.cpp)
    set_source_files_properties(${OTTAVA_CPU_DIR}/${kind}_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c")
    set_source_files_properties(
      ${OTTAVA_CPU_DIR}/${kind}_avx512.cpp
      PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mprefer-vector-width=512")
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # GCC's own AVX-512 header builds "undefined" operands from uninitialized variables, and warns of them.
      set_property(
        SOURCE ${OTTAVA_CPU_DIR}/${kind}_avx512.cpp
        APPEND
        PROPERTY COMPILE_OPTIONS "-Wno-uninitialized;-Wno-maybe-uninitialized")
    endif()
  endforeach()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  target_compile_definitions(ottava_cpu PUBLIC OTTAVA_NEON)
  target_sources(ottava_cpu PRIVATE ${OTTAVA_CPU_DIR}/isa_neon.cpp ${OTTAVA_CPU_DIR}/levels_neon.cpp)
endif()
# These name the loops to unroll, and gain nothing from the longer compilation of -O3.
foreach(isa portable avx2 avx512 neon)
  set_property(
    SOURCE ${OTTAVA_CPU_DIR}/levels_${isa}.cpp
    APPEND
    PROPERTY COMPILE_OPTIONS "$<$<CONFIG:Release>:-O2>")
endforeach()

# Without OpenMP everything runs on one thread.
find_package(OpenMP COMPONENTS CXX)
if(OpenMP_CXX_FOUND)
  target_link_libraries(ottava_cpu PUBLIC OpenMP::OpenMP_CXX)
endif()

# The sources of the CUDA backend, for the extension module and for the tests, which compile them as C++ as well.
set(OTTAVA_CUDA_DIR ${CMAKE_CURRENT_LIST_DIR})
set(OTTAVA_CUDA_KERNELS ${OTTAVA_CUDA_DIR}/cast.cu ${OTTAVA_CUDA_DIR}/data.cu ${OTTAVA_CUDA_DIR}/grid.cu
                        ${OTTAVA_CUDA_DIR}/levels.cu ${OTTAVA_CUDA_DIR}/mx.cu ${OTTAVA_CUDA_DIR}/mx_shard.cu ${OTTAVA_CUDA_DIR}/multi.cu
                        ${OTTAVA_CUDA_DIR}/product.cu)
set(OTTAVA_CUDA_BINDINGS ${OTTAVA_CUDA_DIR}/bindings.cpp ${OTTAVA_CUDA_DIR}/bindings_grid.cpp
                         ${OTTAVA_CUDA_DIR}/bindings_levels.cpp ${OTTAVA_CUDA_DIR}/bindings_multi.cpp)

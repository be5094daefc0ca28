// The tests of grids (test_grid.cpp).
#pragma once

void test_grid_numerics();
// With the instruction set that is in use.
void test_grids();

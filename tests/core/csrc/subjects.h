// What the program of tests calls, one or two functions for each file.
#pragma once

// The arithmetic, and what has no instruction set.
void test_element_numerics();
void test_grid_numerics();
// With the instruction set that is in use.
void test_elements();
void test_mx();
void test_many();
void test_grids();

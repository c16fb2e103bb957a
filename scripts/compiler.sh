#!/bin/sh
# Say so where there is no C++ compiler. It is no error: everything but torch.compile and AOTInductor works without one, and
# trimtab says so for each of them.
command -v "${CXX:-g++}" >/dev/null ||
  echo "There is no C++ compiler (g++), which torch.compile needs: the inductor and aoti recipes will be skipped. apt-get install g++"

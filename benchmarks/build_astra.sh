#!/bin/sh
# Build the published ASTRA-Sim's analytical programs: make astra-sim ASTRA_SIM=DIR [OUT=build/astra-sim]
#
# DIR is a tree of github.com/astra-sim/astra-sim with its submodules chakra (with src/feeder_v3),
# network_backend/analytical and remote_memory_backend/analytical; CHAKRA, NETWORK and MEMORY name
# them where they stand elsewhere. fmt, spdlog and yaml-cpp are the system's:
#   apt-get install cmake g++ protobuf-compiler libprotobuf-dev libspdlog-dev libfmt-dev libyaml-cpp-dev
set -eu
src=${1:?usage: build_astra.sh ASTRA_SIM_TREE OUT}
out=${2:?usage: build_astra.sh ASTRA_SIM_TREE OUT}
for program in cmake g++ protoc; do
    command -v "$program" >/dev/null || { echo "$program is missing (see $0)" >&2; exit 2; }
done
[ -d "$src/astra-sim/system" ] || { echo "$src is no tree of ASTRA-Sim" >&2; exit 2; }
mkdir -p "$out"
out=$(cd "$out" && pwd)
tree=$out/src
rm -rf "$tree"
cp -r "$src" "$tree"
put() {  # from where, to where in the tree: a submodule that stands elsewhere
    [ -z "$1" ] || { rm -rf "${tree:?}/$2"; mkdir -p "$tree/$2"; cp -r "$1"/. "$tree/$2"; }
}
put "${CHAKRA:-}" extern/graph_frontend/chakra
put "${NETWORK:-}" extern/network_backend/analytical
put "${MEMORY:-}" extern/remote_memory_backend/analytical
feeder=$tree/extern/graph_frontend/chakra/src/feeder_v3/et_feeder.h
[ -f "$feeder" ] || { echo "Chakra without src/feeder_v3; set CHAKRA" >&2; exit 2; }
# ASTRA-Sim names the feeder with and without its inner name space.
grep -q 'using FeederV3::ETFeederNode' "$feeder" ||
    printf 'namespace Chakra {\nusing FeederV3::ETFeeder;\nusing FeederV3::ETFeederNode;\n}\n' >>"$feeder"
for package in fmt spdlog yaml-cpp; do
    folder=$tree/extern/helper/$package
    [ "$package" = yaml-cpp ] && folder=$tree/extern/network_backend/analytical/extern/yaml-cpp
    rm -rf "$folder"
    mkdir -p "$folder"
    printf '%s\n' "find_package($package REQUIRED)" "foreach(t $package::$package $package)" \
        " if(TARGET \${t})" "  set_target_properties(\${t} PROPERTIES IMPORTED_GLOBAL TRUE)" \
        " endif()" "endforeach()" >"$folder/CMakeLists.txt"
done
# yaml-cpp is fetched from the network there; the system's does as well.
sed -i -e '/^FetchContent_Declare(/,/^)/d' \
    -e 's/^FetchContent_MakeAvailable(yaml-cpp)/find_package(yaml-cpp REQUIRED)/' "$tree/CMakeLists.txt"
schema=$tree/extern/graph_frontend/chakra/schema/protobuf
protoc et_def.proto --proto_path="$schema" --cpp_out="$schema"
cmake -S "$tree/build/astra_analytical" -B "$out/build" -DBUILDTARGET=all >"$out/cmake.log"
cmake --build "$out/build" -j "${JOBS:-1}" >"$out/make.log" 2>&1 || { tail -5 "$out/make.log"; exit 1; }
ls "$out"/build/bin/AstraSim_Analytical_Congestion_*

#!/bin/sh
# Builds echarts.min.js from the npm packages that package.json names. Needs node and npm.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/package.json" "$here/entry.js" "$work"
cd "$work"
npm install --silent --no-audit --no-fund
npx esbuild entry.js --bundle --minify --format=iife --target=es2019 --legal-comments=none \
    --outfile=echarts.min.js
cp echarts.min.js "$here/echarts.min.js"
cp node_modules/echarts/LICENSE "$here/LICENSE.echarts"
cp node_modules/zrender/LICENSE "$here/LICENSE.zrender"
cp node_modules/tslib/LICENSE.txt "$here/LICENSE.tslib"
ls -l "$here/echarts.min.js"

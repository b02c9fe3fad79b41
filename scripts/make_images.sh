#!/usr/bin/env bash
# Makes docs/images/ anew: trains the example as README says (minutes), and takes its loss curve.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
name="images-$(date +%Y%m%d-%H%M%S)"
scripts/train.sh --name "$name"
mkdir -p docs/images
cp "runs/$name/loss.png" docs/images/loss.png
echo docs/images/loss.png

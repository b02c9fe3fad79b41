#!/usr/bin/env bash
# Makes the pictures of the examples in docs/images/ again: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'EOT'
usage: scripts/make_images.sh [loss] [fit_autograd] [custom_loop] [train_digits] [watch] [precisions]
                              [little_communication]

Makes .venv (the first time only), trains these examples with their default options, and copies their
pictures to docs/images/. The default is the first four. loss is the picture of README: train_gpt on
two MPI ranks, which takes minutes; the other three take seconds each. The rest is made only if it is
named: watch, the page of `mpishard watch` in docs/watch.md, needs chromium; precisions compares
float32 and bfloat16 over three seeds, in six runs of train_gpt, about twelve minutes;
little_communication draws the figures in benchmarks/results/little_communication.jsonl.
EOT
}

images=()
for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit ;;
        loss | fit_autograd | custom_loop | train_digits | watch | precisions | little_communication)
            images+=("$argument") ;;
        *) refuse "there is no picture $argument; --help names them" ;;
    esac
done
[ ${#images[@]} -gt 0 ] || images=(loss fit_autograd custom_loop train_digits)

prepare_environment mpi plot examples bf16
cd -- "$root"
run="runs/images-$(date +%Y%m%d-%H%M%S)"
mkdir -p docs/images
for image in "${images[@]}"; do
    if [ "$image" = watch ]; then
        "$python" tests/cli/draw_watch.py docs/images/watch.png
        echo docs/images/watch.png
        continue
    elif [ "$image" = little_communication ]; then
        "$python" benchmarks/little_communication.py \
            --draw benchmarks/results/little_communication.jsonl docs/images/little_communication.png
        continue
    elif [ "$image" = precisions ]; then
        made=()
        for seed in 0 1 2; do
            for precision in float32 bfloat16; do
                made+=("$run/$seed/$precision") # runs of the same name have the same colour
                scripts/train.sh --new --name "${made[-1]#runs/}" --seed "$seed" \
                    --precision "$precision"
            done
        done
        "$python" -m mpishard plot --unit 'nats per byte' -o docs/images/precisions.png "${made[@]}"
        continue
    elif [ "$image" = loss ]; then
        scripts/train.sh --name "${run#runs/}"
    else
        "$python" "examples/$image.py" --output "$run/$image"
    fi
    case "$image" in
        loss) made="$run/loss.png" ;;
        fit_autograd) made="$run/$image/field.png" ;;
        custom_loop) made="$run/$image/loop.png" ;;
        train_digits) made="$run/$image/digits.png" ;;
    esac
    cp -- "$made" "docs/images/$image.png"
    echo "docs/images/$image.png"
done

"""The kernels. A program walks down a run of rows of a few channels, and holds in registers what a row needs of others.

So each number is read once but for the rows at the ends of a run, and the weights' gradients are sums in registers.
Rows are tokens counted over the whole batch: row b * T + t. A row's position in its document is the number of rows
before it that it may see. Where no row of a run is near a document's start, the run is plain, and needs no masks: they
take as many instructions as the products.

Channels come in parts, each with a tensor of its own on the side of y. A block of channels lies in one part.
"""

import triton
import triton.language as tl


@triton.jit
def _place(parts, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program's run, its first row (int64), its part (tensor, width, first channel), and the channels in that."""
    program = tl.program_id(0)
    run = (program // BLOCKS).to(tl.int64)
    block = program % BLOCKS
    part, width, first, before = parts[0], WIDTHS[0], 0, 0
    skipped: tl.constexpr = 0
    passed: tl.constexpr = 0
    for i in tl.static_range(1, len(WIDTHS)):
        skipped += (WIDTHS[i - 1] + BLOCK - 1) // BLOCK
        passed += WIDTHS[i - 1]
        if block >= skipped:
            part, width, first, before = parts[i], WIDTHS[i], passed, skipped
    return run, run * ROWS, part, width, first, (block - before) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _is_plain(positions, row, num_rows, seq_len, TAPS: tl.constexpr, COUNT: tl.constexpr):
    """Whether COUNT rows exist from `row` on, and each sees TAPS - 1 rows before it, which exist as well."""
    plain = (row >= TAPS - 1) & (row + COUNT <= num_rows)
    if positions is not None:
        i = tl.arange(0, triton.next_power_of_2(COUNT))
        position = tl.load(positions + row + i, mask=(i < COUNT) & plain, other=TAPS)
        plain &= tl.min(position) >= TAPS - 1
    else:
        token = row % seq_len
        plain &= (token >= TAPS - 1) & (token + COUNT <= seq_len)
    return plain


@triton.jit
def _parameters(weight, bias, channel, inside, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of each lag, a tuple, and the bias, fp32."""
    weights = ()
    for lag in tl.static_range(TAPS):
        weights = weights + (tl.load(weight + lag * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32),)
    if bias is not None:
        shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        shift = tl.zeros([BLOCK], tl.float32)
    return weights, shift


@triton.jit
def _rows(x, stride, row, num_rows, inside, COUNT: tl.constexpr, STEP: tl.constexpr, PLAIN: tl.constexpr):
    """A tuple of COUNT rows, from `row` on in steps of STEP, zero where there is none."""
    rows = ()
    for i in tl.static_range(COUNT):
        at = row + i * STEP
        there = inside if PLAIN else inside & (at >= 0) & (at < num_rows)
        rows = rows + (tl.load(x + at * stride, mask=there, other=0.0),)
    return rows


@triton.jit
def _float(rows, COUNT: tl.constexpr):
    wide = ()
    for i in tl.static_range(COUNT):
        wide = wide + (rows[i].to(tl.float32),)
    return wide


@triton.jit
def _positions(positions, row, num_rows, seq_len, COUNT: tl.constexpr, PLAIN: tl.constexpr):
    """A tuple of the positions of COUNT rows from `row` on; they do not matter in a plain run."""
    found = ()
    for i in tl.static_range(COUNT):
        if PLAIN:
            found = found + (0,)
        elif positions is not None:
            found = found + (tl.load(positions + row + i, mask=row + i < num_rows, other=0),)
        else:
            found = found + ((row + i) % seq_len,)
    return found


@triton.jit
def _visible(newest, before, position, TAPS: tl.constexpr, PLAIN: tl.constexpr):
    """A row, and those before it: the lags 0 to TAPS - 1, zero outside its document."""
    seen = (newest,)
    for lag in tl.static_range(1, TAPS):
        seen = seen + (before[lag - 1] if PLAIN else tl.where(position >= lag, before[lag - 1], 0.0),)
    return seen


@triton.jit
def _shifted(newest, before, TAPS: tl.constexpr):
    """The TAPS - 1 rows before the next."""
    window = ()
    if TAPS > 1:
        window = (newest,)
        for lag in tl.static_range(TAPS - 2):
            window = window + (before[lag],)
    return window


@triton.jit
def _weighted(seen, weights, shift, TAPS: tl.constexpr):
    z = shift
    for lag in tl.static_range(TAPS):
        z = tl.fma(weights[lag], seen[lag], z)
    return z


@triton.jit
def _forward_run(
    x,
    weights,
    shift,
    positions,
    y,
    y_row,
    row,
    num_rows,
    seq_len,
    inside,
    X_ROW: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PLAIN: tl.constexpr,
):
    before = _float(_rows(x, X_ROW, row - 1, num_rows, inside, TAPS - 1, -1, PLAIN), TAPS - 1)
    ahead = _rows(x, X_ROW, row, num_rows, inside, STEP, 1, PLAIN)
    for _ in range(0, ROWS, STEP):
        now = ahead
        ahead = _rows(x, X_ROW, row + STEP, num_rows, inside, STEP, 1, False)
        position = _positions(positions, row, num_rows, seq_len, STEP, PLAIN)
        for i in tl.static_range(STEP):
            newest = now[i].to(tl.float32)
            z = _weighted(_visible(newest, before, position[i], TAPS, PLAIN), weights, shift, TAPS)
            before = _shifted(newest, before, TAPS)
            if SILU:
                z *= tl.sigmoid(z)
            there = inside if PLAIN else inside & (row + i < num_rows)
            tl.store(y + (row + i) * y_row, z.to(y.dtype.element_ty), mask=there)
        row += STEP


@triton.jit(do_not_specialize=["num_rows", "seq_len"])
def forward_kernel(
    x,
    weight,
    bias,
    positions,
    parts,
    num_rows,
    seq_len,
    X_ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a run of ROWS rows and a block of channels; it reads STEP rows at once."""
    _, row, y, width, first, channel = _place(parts, WIDTHS, BLOCKS, ROWS, BLOCK)
    inside = channel < width
    weights, shift = _parameters(weight, bias, first + channel, inside, CHANNELS, TAPS, BLOCK)
    run = x + first + channel, weights, shift, positions, y + channel, width, row, num_rows, seq_len, inside
    if _is_plain(positions, row, num_rows, seq_len, TAPS, ROWS):
        _forward_run(*run, X_ROW, TAPS, SILU, ROWS, STEP, PLAIN=True)
    else:
        _forward_run(*run, X_ROW, TAPS, SILU, ROWS, STEP, PLAIN=False)


@triton.jit
def _backward_rows(
    read,
    upstream,
    weights,
    shift,
    positions,
    grad_x,
    row,
    begin,
    num_rows,
    seq_len,
    inside,
    state,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    COUNT: tl.constexpr,
    OWN: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """COUNT rows, the run's OWN or those after it; the state before and after them.

    Returns the rows before, the gradients that are pending, and the sums of the weights' and the bias' gradients.
    """
    before, pending, sums, grad_shift = state
    position = _positions(positions, row, num_rows, seq_len, COUNT, PLAIN)
    for i in tl.static_range(COUNT):
        newest = read[i].to(tl.float32)
        seen = _visible(newest, before, position[i], TAPS, PLAIN)
        before = _shifted(newest, before, TAPS)
        grad = upstream[i].to(tl.float32)
        if SILU:
            z = _weighted(seen, weights, shift, TAPS)
            gate = tl.sigmoid(z)
            grad *= gate * tl.fma(z, 1 - gate, 1.0)
        if OWN:
            grad_shift += grad
            added = ()
            for lag in tl.static_range(TAPS):
                added = added + (tl.fma(grad, seen[lag], sums[lag]),)
            sums = added
        completed = (weights[0] * grad,)
        for lag in tl.static_range(1, TAPS):
            total = tl.fma(weights[lag], grad, pending[lag - 1])
            if not PLAIN:
                total = tl.where(position[i] >= lag, total, pending[lag - 1])
            completed = completed + (total,)
        pending = _shifted(completed[0], completed[1:], TAPS)
        done = row + i - (TAPS - 1)
        there = inside & (done >= begin) if PLAIN else inside & (done >= begin) & (done < num_rows)
        tl.store(grad_x + done * CHANNELS, completed[TAPS - 1].to(grad_x.dtype.element_ty), mask=there)
    return before, pending, sums, grad_shift


@triton.jit
def _backward_run(
    grad_y,
    grad_y_row,
    x,
    weights,
    shift,
    positions,
    grad_x,
    row,
    num_rows,
    seq_len,
    inside,
    X_ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """The sums of the weights' and the bias' gradients."""
    begin = row
    zero = shift * 0.0
    pending = ()
    for _ in tl.static_range(TAPS - 1):
        pending = pending + (zero,)
    before = _float(_rows(x, X_ROW, row - 1, num_rows, inside, TAPS - 1, -1, PLAIN), TAPS - 1)
    state = before, pending, pending + (zero,), zero
    parameters = weights, shift, positions, grad_x
    bounds = begin, num_rows, seq_len, inside
    x_ahead = _rows(x, X_ROW, row, num_rows, inside, STEP, 1, PLAIN)
    grad_ahead = _rows(grad_y, grad_y_row, row, num_rows, inside, STEP, 1, PLAIN)
    for _ in range(0, ROWS, STEP):
        read, upstream = x_ahead, grad_ahead
        x_ahead = _rows(x, X_ROW, row + STEP, num_rows, inside, STEP, 1, False)
        grad_ahead = _rows(grad_y, grad_y_row, row + STEP, num_rows, inside, STEP, 1, False)
        state = _backward_rows(
            read, upstream, *parameters, row, *bounds, state, CHANNELS, TAPS, SILU, STEP, OWN=True, PLAIN=PLAIN
        )
        row += STEP
    if TAPS > 1:
        read = _rows(x, X_ROW, row, num_rows, inside, TAPS - 1, 1, PLAIN)
        upstream = _rows(grad_y, grad_y_row, row, num_rows, inside, TAPS - 1, 1, PLAIN)
        state = _backward_rows(
            read, upstream, *parameters, row, *bounds, state, CHANNELS, TAPS, SILU, TAPS - 1, OWN=False, PLAIN=PLAIN
        )
    return state[2], state[3]


@triton.jit(do_not_specialize=["num_rows", "seq_len"])
def backward_kernel(
    parts,
    x,
    weight,
    bias,
    positions,
    grad_x,
    partial,
    num_rows,
    seq_len,
    X_ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a run of ROWS rows and a block of channels, and the rows after the run that see it.

    With z the convolution, dz = silu'(z) dy, a row t adds w_lag dz_t to the pending gradients of the rows t - lag that
    it sees, of which the last is then complete, and dz_t x_{t - lag} to the run's sums for the weights.
    """
    number, row, grad_y, width, first, channel = _place(parts, WIDTHS, BLOCKS, ROWS, BLOCK)
    inside = channel < width
    weights, shift = _parameters(weight, bias, first + channel, inside, CHANNELS, TAPS, BLOCK)
    channel_x = first + channel
    place = grad_y + channel, width, x + channel_x, weights, shift, positions, grad_x + channel_x
    rows = row, num_rows, seq_len, inside
    if _is_plain(positions, row, num_rows, seq_len, TAPS, ROWS + TAPS - 1):
        sums, grad_shift = _backward_run(*place, *rows, X_ROW, CHANNELS, TAPS, SILU, ROWS, STEP, PLAIN=True)
    else:
        sums, grad_shift = _backward_run(*place, *rows, X_ROW, CHANNELS, TAPS, SILU, ROWS, STEP, PLAIN=False)
    SUMS: tl.constexpr = TAPS + (bias is not None)
    total = partial + number * SUMS * CHANNELS + channel_x
    for lag in tl.static_range(TAPS):
        tl.store(total + lag * CHANNELS, sums[lag], mask=inside)
    if bias is not None:
        tl.store(total + TAPS * CHANNELS, grad_shift, mask=inside)

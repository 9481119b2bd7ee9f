"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const view = $("view"), canvas = $("canvas"), context = canvas.getContext("2d"), tip = $("tip");
  const AXIS = 26, ROW = 17, HEAD = 22, GUTTER = 150, ERROR = 1, UNFINISHED = 2;
  // Columns of a span, see trace_export/page.py.
  const ID = 0, LANE = 1, DEPTH = 2, START = 3, LENGTH = 4, NAME = 5, PARENT = 6, FLAGS = 7, SITE = 8, VALUES = 9,
    EVENTS = 10, SOURCES = 11, MESSAGE = 12;
  const spans = data.spans, total = Math.max(data.duration_ns, 1);
  const index = new Map(spans.map((span, i) => [span[ID], i]));
  const children = spans.map(() => []), receivers = spans.map(() => []);
  spans.forEach((span, i) => {
    if (span[PARENT] >= 0) children[span[PARENT]].push(i);
    for (const source of span[SOURCES]) receivers[source].push(i);
  });
  const processOf = (i) => data.lanes[spans[i][LANE]].process;
  const levelOf = (i) => data.names[spans[i][NAME]].level;
  const failures = spans.map((_, i) => i).filter((i) => spans[i][FLAGS] & ERROR);

  let from = 0, to = total, selected = -1, level = 3, query = "", matches = null, order = [];
  let rows = [], height = 0, width = 0, viewHeight = 0, hatch = null, colors = {};

  // --- words

  const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
  function duration(ns) {
    for (const [size, unit] of UNITS) {
      if (ns >= size * 0.9995) {
        const value = ns / size;
        return (size === 1 ? value.toFixed(0) : value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)) + " " + unit;
      }
    }
    return "0 ns";
  }
  const instant = (ns) => (ns / 1e9).toFixed(6) + " s";
  function label(i) {
    const name = data.names[spans[i][NAME]].name;
    const method = value(i, "rpc.method") ?? (name === "future.result" ? value(i, "minivllm.method") : undefined);
    return method && /^(rpc\.(call|execute)|future\.result)$/.test(name) ? `${name} ${method}` : name;
  }
  function value(i, key) {
    const number = data.keys.indexOf(key);
    const found = spans[i][VALUES].find((pair) => pair[0] === number);
    return found && found[1];
  }

  // --- rows

  function layout() {
    rows = [];
    let y = AXIS, process = -1;
    data.lanes.forEach((lane, number) => {
      if (lane.process !== process) {
        process = lane.process;
        rows.push({ y, height: HEAD, process, spans: [], heading: true });
        y += HEAD;
      }
      const depths = [];
      for (const i of lane.spans) {
        if (levelOf(i) > level) continue;
        (depths[spans[i][DEPTH]] ||= []).push(i);
      }
      let first = true;
      for (const members of depths) {
        if (!members) continue;
        rows.push({ y, height: ROW, process, spans: members, lane: first ? lane.name : "", number });
        first = false;
        y += ROW;
      }
    });
    height = y + 12;
    for (const row of rows) for (const i of row.spans) spans[i].row = row;
    resize();
  }

  function resize() {
    const box = view.getBoundingClientRect(), scale = window.devicePixelRatio || 1;
    width = view.clientWidth || box.width;
    viewHeight = view.clientHeight || box.height;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(viewHeight * scale);
    canvas.style.width = width + "px";
    canvas.style.height = viewHeight + "px";
    context.setTransform(scale, 0, 0, scale, 0, 0);
    $("spacer").style.height = Math.max(0, height - viewHeight) + "px";
    const style = getComputedStyle(document.documentElement);
    for (const name of ["back", "panel", "line", "text", "faint", "error", "select"]) {
      colors[name] = style.getPropertyValue("--" + name).trim();
    }
    hatch = makeHatch();
    draw();
  }

  function makeHatch() {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.strokeStyle = colors.error;
    pen.lineWidth = 1.6;
    pen.beginPath();
    for (const x of [-6, 0, 6]) { pen.moveTo(x, 6); pen.lineTo(x + 6, 0); }
    pen.stroke();
    return context.createPattern(tile, "repeat");
  }

  // --- drawing

  const x = (ns) => GUTTER + (ns - from) * (width - GUTTER) / (to - from);
  const timeAt = (px) => from + (px - GUTTER) * (to - from) / (width - GUTTER);
  let asked = false;
  function draw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; paint(); });
  }

  function paint() {
    const top = view.scrollTop;
    context.fillStyle = colors.back;
    context.fillRect(0, 0, width, viewHeight);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const marks = ticks();
    context.strokeStyle = colors.line;
    context.lineWidth = 1;
    for (const [ns] of marks) line(x(ns), AXIS, x(ns), viewHeight);
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, width - GUTTER, viewHeight);
    context.clip();
    for (const row of rows) {
      const y = row.y - top;
      if (y + row.height < AXIS || y > viewHeight) continue;
      paintRow(row, y);
    }
    if (selected >= 0) paintArrows(top);
    context.restore();
    paintGutter(top);
    paintAxis(marks);
  }

  function line(x1, y1, x2, y2) {
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  }

  function paintRow(row, y) {
    if (row.heading) {
      context.fillStyle = colors.panel;
      context.fillRect(GUTTER, y + 4, width, HEAD - 6);
      return;
    }
    let last = -1;
    for (let n = firstVisible(row.spans); n < row.spans.length; n++) {
      const i = row.spans[n], span = spans[i];
      if (span[START] > to) break;
      const left = Math.max(x(span[START]), GUTTER - 2), right = Math.min(x(span[START] + span[LENGTH]), width + 2);
      const special = i === selected || span[FLAGS] || (matches && matches[i]);
      // Thousands of spans may fall on one pixel: the first one and those that matter are enough.
      if (right - left < 1 && Math.floor(left) === last && !special) continue;
      last = Math.floor(left);
      paintSpan(i, span, left, y, Math.max(right - left, 1), row);
    }
  }

  function firstVisible(members) {
    let low = 0, high = members.length;
    while (low < high) {
      const middle = (low + high) >> 1, span = spans[members[middle]];
      if (span[START] + span[LENGTH] < from) low = middle + 1; else high = middle;
    }
    return low;
  }

  function paintSpan(i, span, left, y, length, row) {
    const flags = span[FLAGS];
    context.globalAlpha = matches && !matches[i] ? 0.22 : 1;
    context.fillStyle = flags & ERROR && !(flags & UNFINISHED) ? colors.error : data.processes[row.process].color;
    if (!(flags & UNFINISHED)) {
      context.globalAlpha *= span[DEPTH] % 2 ? 0.78 : 1;
      context.fillRect(left, y + 1, length, ROW - 2);
      context.globalAlpha = matches && !matches[i] ? 0.22 : 1;
    } else {
      context.fillStyle = hatch;
      context.fillRect(left, y + 1, length, ROW - 2);
      context.strokeStyle = colors.error;
      context.strokeRect(left + 0.5, y + 1.5, Math.max(length - 1, 1), ROW - 3);
    }
    if (length > 26) {
      context.save();
      context.beginPath();
      context.rect(left, y, length - 3, ROW);
      context.clip();
      const room = Math.max(left, GUTTER) + 4;
      const text = length > 150 ? `${label(i)}  ${duration(span[LENGTH])}` : label(i);
      if (flags & UNFINISHED) {
        // Letters on hatching cannot be read.
        context.fillStyle = colors.back;
        context.fillRect(room - 2, y + 2, context.measureText(text).width + 4, ROW - 4);
      }
      context.fillStyle = flags & UNFINISHED ? colors.text : "#0b0f14";
      context.fillText(text, room, y + ROW / 2 + 0.5);
      context.restore();
    }
    for (const [time] of span[EVENTS]) {
      const at = x(time);
      context.fillStyle = colors.select;
      context.beginPath();
      context.moveTo(at, y + 1);
      context.lineTo(at + 3.5, y + 5);
      context.lineTo(at, y + 9);
      context.lineTo(at - 3.5, y + 5);
      context.fill();
    }
    if (i === selected) {
      context.globalAlpha = 1;
      context.strokeStyle = colors.select;
      context.lineWidth = 2;
      context.strokeRect(left, y + 1, Math.max(length, 2), ROW - 2);
      context.lineWidth = 1;
    }
    context.globalAlpha = 1;
  }

  function paintArrows(top) {
    const span = spans[selected];
    const pairs = span[SOURCES].map((source) => [source, selected]);
    for (const receiver of receivers[selected]) pairs.push([selected, receiver]);
    if (span[PARENT] >= 0 && processOf(span[PARENT]) !== processOf(selected)) pairs.push([span[PARENT], selected]);
    for (const child of children[selected]) if (processOf(child) !== processOf(selected)) pairs.push([selected, child]);
    context.strokeStyle = context.fillStyle = colors.select;
    for (const [source, target] of pairs) {
      if (!spans[source].row || !spans[target].row) continue;
      const isMessage = spans[target][SOURCES].includes(source);
      const end = isMessage ? spans[target][START] + spans[target][LENGTH] : spans[target][START];
      const begin = Math.min(spans[source][START] + spans[source][LENGTH], Math.max(spans[source][START], end));
      const x1 = x(begin), y1 = spans[source].row.y - top + ROW / 2;
      const x2 = x(end), y2 = spans[target].row.y - top + ROW / 2;
      context.beginPath();
      context.moveTo(x1, y1);
      context.bezierCurveTo(x1 + 24, y1, x2 - 24, y2, x2, y2);
      context.stroke();
      context.beginPath();
      context.moveTo(x2, y2);
      context.lineTo(x2 - 7, y2 - 3.5);
      context.lineTo(x2 - 7, y2 + 3.5);
      context.fill();
    }
  }

  function paintGutter(top) {
    context.fillStyle = colors.back;
    context.fillRect(0, AXIS, GUTTER, viewHeight);
    for (const row of rows) {
      const y = row.y - top;
      if (y + row.height < AXIS || y > viewHeight) continue;
      if (row.heading) {
        const process = data.processes[row.process];
        context.fillStyle = process.color;
        context.fillRect(6, y + 6, 10, 10);
        context.font = "bold 12px system-ui, sans-serif";
        context.fillStyle = colors.text;
        context.fillText(process.name, 21, y + HEAD / 2, GUTTER - 26);
        context.font = "11px system-ui, sans-serif";
      } else if (row.lane) {
        context.fillStyle = colors.faint;
        context.fillText(row.lane, 21, y + ROW / 2, GUTTER - 26);
      }
    }
    context.strokeStyle = colors.line;
    line(GUTTER - 0.5, 0, GUTTER - 0.5, viewHeight);
  }

  function ticks() {
    const atLeast = (to - from) / Math.max(2, (width - GUTTER) / 95);
    const power = 10 ** Math.floor(Math.log10(Math.max(atLeast, 1)));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= atLeast) || 1;
    const [size, unit] = UNITS.find(([size]) => to >= 2 * size) || UNITS[3];
    const found = [];
    for (let ns = Math.ceil(from / step) * step; ns <= to; ns += step) {
      const digits = Math.max(0, Math.ceil(-Math.log10(step / size)));
      found.push([ns, `${(ns / size).toFixed(digits)} ${unit}`]);
    }
    return found;
  }

  function paintAxis(marks) {
    context.fillStyle = colors.panel;
    context.fillRect(0, 0, width, AXIS);
    context.strokeStyle = colors.line;
    line(0, AXIS - 0.5, width, AXIS - 0.5);
    context.fillStyle = colors.faint;
    for (const [ns, text] of marks) {
      const at = x(ns);
      if (at < GUTTER) continue;
      line(at, AXIS - 6, at, AXIS);
      context.fillText(text, at + 3, AXIS / 2);
    }
    context.fillText(`${duration(to - from)} shown`, 8, AXIS / 2);
  }

  // --- moving

  function show(begin, end) {
    const least = 50;
    let length = Math.min(Math.max(end - begin, least), total * 1.04);
    const middle = (begin + end) / 2;
    from = Math.min(Math.max(middle - length / 2, -total * 0.02), total * 1.02 - length);
    to = from + length;
    draw();
    remember();
  }
  function zoom(factor, around = selectedMiddle()) {
    show(around - (around - from) * factor, around + (to - around) * factor);
  }
  function selectedMiddle() {
    if (selected >= 0) {
      const middle = spans[selected][START] + spans[selected][LENGTH] / 2;
      if (middle > from && middle < to) return middle;
    }
    return (from + to) / 2;
  }
  const fit = () => show(-total * 0.01, total * 1.01);
  function zoomToSpan(i) {
    if (i < 0) return;
    const pad = Math.max(spans[i][LENGTH] * 0.15, 100);
    show(spans[i][START] - pad, spans[i][START] + spans[i][LENGTH] + pad);
  }

  function scrollTo(i) {
    const y = spans[i].row ? spans[i].row.y - view.scrollTop : AXIS + ROW;
    if (y < AXIS + ROW || y > viewHeight - 3 * ROW) view.scrollTop = Math.max(0, y + view.scrollTop - viewHeight / 2);
  }
  /** Scroll and pan so that a span can be seen; zoom in if it would be a hair. */
  function reveal(i) {
    const span = spans[i];
    if (!span.row) return;
    scrollTo(i);
    const length = to - from, end = span[START] + span[LENGTH];
    if (span[LENGTH] * (width - GUTTER) / length < 3) {
      const wanted = Math.max(span[LENGTH] * 20, 2000);
      show(span[START] - wanted / 2, end + wanted / 2);
    } else if (end < from || span[START] > to) {
      show((span[START] + end - length) / 2, (span[START] + end + length) / 2);
    }
  }

  // --- selecting

  function select(i, moveThere = true) {
    selected = i;
    if (i >= 0 && levelOf(i) > level) {
      level = 3;
      $("level").value = "3";
      layout();
    }
    if (i >= 0 && moveThere) reveal(i);
    describe();
    draw();
    remember();
    $("zoom-span").disabled = i < 0;
  }

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }
  function stepButton(i) {
    const button = element("button", undefined, "step");
    const mark = element("i");
    mark.style.background = data.processes[processOf(i)].color;
    button.type = "button";
    button.append(mark, `${label(i)} · ${data.processes[processOf(i)].name} · ${duration(spans[i][LENGTH])}`);
    button.addEventListener("click", () => { select(i); });
    return button;
  }
  function list(panel, title, members) {
    if (!members.length) return;
    panel.append(element("h3", title));
    members.slice(0, 40).forEach((i) => panel.append(stepButton(i)));
    if (members.length > 40) panel.append(element("p", `and ${members.length - 40} more`, "faint"));
  }

  function describe() {
    const panel = $("details");
    panel.replaceChildren();
    if (selected < 0) {
      panel.append(element("p", "Select a step: click on it, or move here with Tab and the arrow keys."));
      return;
    }
    const span = spans[selected], name = data.names[span[NAME]], process = data.processes[processOf(selected)];
    panel.append(element("h2", label(selected)));
    panel.append(element("p", `${process.name}, pid ${process.pid}, ${data.lanes[span[LANE]].name}`, "faint"));
    if (span[FLAGS] & ERROR) panel.append(element("p", span[MESSAGE] || "failed", "error"));
    if (name.what) panel.append(element("p", name.what));
    const table = element("table"), body = element("tbody");
    table.append(body);
    const row = (key, text) => {
      const line = element("tr"), head = element("th", key);
      head.scope = "row";
      line.append(head, element("td", text));
      body.append(line);
    };
    row("begins", instant(span[START]));
    row("takes", duration(span[LENGTH]));
    if (name.articles) row("articles", name.articles);
    if (name.vllm) row("vLLM 0.25.1", name.vllm);
    const site = data.sites[span[SITE]];
    if (site) row("emitted by", `${site[1]}:${site[2]} ${site[0]}`);
    for (const [key, text] of span[VALUES]) row(data.keys[key].replace(/^minivllm\./, ""), String(text));
    row("span id", span[ID]);
    panel.append(table);
    for (const [time, event, values] of span[EVENTS]) {
      panel.append(element("h3", `${event} at ${instant(time)}`));
      panel.append(element("pre", values.map(([key, text]) => `${key.replace(/^minivllm\./, "")}: ${text}`).join("\n")));
    }
    list(panel, "message from", span[SOURCES]);
    list(panel, "message to", receivers[selected]);
    if (span[PARENT] >= 0) list(panel, "within", [span[PARENT]]);
    list(panel, "steps inside", children[selected]);
  }

  // --- searching

  function words(i) {
    const span = spans[i];
    if (span.words === undefined) {
      span.words = [label(i), data.processes[processOf(i)].name, span[MESSAGE] || "",
        ...span[VALUES].map(([key, text]) => `${data.keys[key].replace(/^minivllm\./, "")}=${text}`),
        ...span[EVENTS].map(([, event, values]) => `${event} ${values.join(" ")}`)].join("\n").toLowerCase();
    }
    return span.words;
  }
  function search(text) {
    query = text.trim().toLowerCase();
    if (query === "") {
      matches = null;
      order = [];
      $("matches").textContent = "";
    } else {
      matches = new Uint8Array(spans.length);
      order = [];
      spans.forEach((_, i) => { if (words(i).includes(query)) { matches[i] = 1; order.push(i); } });
      order.sort((a, b) => spans[a][START] - spans[b][START]);
      $("matches").textContent = order.length ? `${order.length} found` : "none found";
    }
    $("next").disabled = $("previous").disabled = order.length === 0;
    draw();
    remember();
  }
  function step(members, by) {
    if (!members.length) return;
    const now = selected < 0 ? -Infinity : spans[selected][START];
    const at = members.indexOf(selected);
    let next;
    if (at >= 0) next = members[(at + by + members.length) % members.length];
    else if (by > 0) next = members.find((i) => spans[i][START] >= now) ?? members[0];
    else next = members.findLast((i) => spans[i][START] <= now) ?? members[members.length - 1];
    select(next);
  }

  // --- the address holds what is shown, so that it can be passed on

  let remembering = 0;
  function remember() {
    clearTimeout(remembering);
    remembering = setTimeout(() => {
      const parts = new URLSearchParams();
      if (selected >= 0) parts.set("span", spans[selected][ID]);
      if (query) parts.set("q", query);
      parts.set("from", Math.round(from));
      parts.set("to", Math.round(to));
      try { history.replaceState(null, "", "#" + parts); } catch { /* some viewers have no address */ }
    }, 300);
  }
  function recall() {
    const parts = new URLSearchParams(location.hash.slice(1));
    if (parts.has("level")) {
      level = Number(parts.get("level")) || 3;
      $("level").value = String(level);
      layout();
    }
    if (parts.get("q")) {
      $("search").value = parts.get("q");
      search(parts.get("q"));
    }
    const begin = Number(parts.get("from") ?? NaN), end = Number(parts.get("to") ?? NaN);
    if (end > begin) show(begin, end); else fit();
    const wanted = parts.get("span");
    if (!index.has(wanted)) return;
    select(index.get(wanted), !(end > begin));
    scrollTo(selected);
  }

  // --- keys and pointer

  function sibling(by) {
    if (selected < 0) { select(order[0] ?? 0); return; }
    const members = spans[selected].row.spans, next = members[members.indexOf(selected) + by];
    if (next !== undefined) select(next);
  }
  view.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const length = to - from;
    const actions = {
      ArrowLeft: () => sibling(-1),
      ArrowRight: () => sibling(1),
      ArrowUp: () => { if (selected >= 0 && spans[selected][PARENT] >= 0) select(spans[selected][PARENT]); },
      ArrowDown: () => { if (selected < 0) select(0); else if (children[selected].length) select(children[selected][0]); },
      "+": () => zoom(0.6), "=": () => zoom(0.6), w: () => zoom(0.6),
      "-": () => zoom(1 / 0.6), s: () => zoom(1 / 0.6),
      a: () => show(from - length / 5, to - length / 5), d: () => show(from + length / 5, to + length / 5),
      z: () => zoomToSpan(selected), 0: fit, f: () => step(failures, 1), F: () => step(failures, -1),
      "/": () => $("search").focus(), Enter: () => $("details").focus(), Escape: () => select(-1),
      n: () => step(order, 1), N: () => step(order, -1),
    };
    if (actions[event.key]) {
      actions[event.key]();
      event.preventDefault();
    }
  });

  function hit(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, y = event.clientY - box.top + view.scrollTop;
    if (px < GUTTER || event.clientY - box.top < AXIS) return -1;
    const row = rows.find((candidate) => !candidate.heading && y >= candidate.y && y < candidate.y + ROW);
    if (!row) return -1;
    let best = -1, distance = 4;
    for (let n = Math.max(0, firstVisible(row.spans) - 1); n < row.spans.length; n++) {
      const i = row.spans[n], left = x(spans[i][START]), right = x(spans[i][START] + spans[i][LENGTH]);
      if (left > px + 4) break;
      const away = px < left ? left - px : px > right ? px - right : 0;
      if (away < distance || (away === 0 && distance > 0)) { best = i; distance = away; }
    }
    return best;
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = { x: event.clientX, from, to, moved: false, range: event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
    view.focus({ preventScroll: true });
  });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    if (drag) {
      const by = event.clientX - drag.x;
      if (Math.abs(by) > 3) drag.moved = true;
      if (!drag.moved) return;
      canvas.classList.add("moving");
      tip.hidden = true;
      if (drag.range) {
        paint();
        context.fillStyle = "#3f9fe044";
        context.fillRect(drag.x - box.left, AXIS, by, viewHeight);
      } else {
        const shift = by * (drag.to - drag.from) / (width - GUTTER);
        show(drag.from - shift, drag.to - shift);
      }
      return;
    }
    const i = hit(event);
    tip.hidden = i < 0;
    if (i >= 0) {
      tip.textContent = `${label(i)} · ${duration(spans[i][LENGTH])}` + (spans[i][FLAGS] & ERROR ? ` · ${spans[i][MESSAGE]}` : "");
      tip.style.left = Math.min(event.clientX - box.left + 12, width - 220) + "px";
      tip.style.top = event.clientY - box.top + view.scrollTop + 16 + "px";
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const box = canvas.getBoundingClientRect();
    if (!drag.moved) select(hit(event), false);
    else if (drag.range) {
      const ends = [timeAt(drag.x - box.left), timeAt(event.clientX - box.left)].sort((a, b) => a - b);
      show(ends[0], ends[1]);
    }
    drag = null;
    canvas.classList.remove("moving");
  });
  canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("moving"); });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", (event) => zoomToSpan(hit(event)));
  view.addEventListener("wheel", (event) => {
    const box = canvas.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(event.deltaY * 0.003), timeAt(Math.max(event.clientX - box.left, GUTTER)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const by = (event.deltaX || event.deltaY) * (to - from) / (width - GUTTER);
      show(from + by, to + by);
    }
  }, { passive: false });
  view.addEventListener("scroll", draw);
  $("search").addEventListener("input", (event) => search(event.target.value));
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") step(order, event.shiftKey ? -1 : 1);
    if (event.key === "Escape") { event.target.value = ""; search(""); view.focus(); }
  });
  $("next").addEventListener("click", () => step(order, 1));
  $("previous").addEventListener("click", () => step(order, -1));
  $("failure").addEventListener("click", () => select(data.first_failure >= 0 ? data.first_failure : failures[0] ?? -1));
  $("zoom-in").addEventListener("click", () => zoom(0.6));
  $("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  $("zoom-span").addEventListener("click", () => zoomToSpan(selected));
  $("fit").addEventListener("click", fit);
  $("level").addEventListener("change", (event) => {
    level = Number(event.target.value);
    if (selected >= 0 && levelOf(selected) > level) selected = -1;
    layout();
    describe();
  });
  window.addEventListener("resize", resize);
  window.addEventListener("hashchange", recall);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resize);

  // --- start

  $("summary").textContent = data.summary;
  for (const process of data.processes) {
    const item = element("li"), mark = element("i");
    mark.style.background = process.color;
    item.append(mark, `${process.name} (pid ${process.pid})`);
    $("legend").append(item);
  }
  $("failure").hidden = failures.length === 0;
  $("next").disabled = $("previous").disabled = $("zoom-span").disabled = true;
  layout();
  recall();
  document.documentElement.dataset.ready = String(spans.length);
})();

// The explorer's page. Values from the data become text nodes, never HTML.
"use strict";

const LARGEST = 2 ** 24; // most bytes of an image, as on the server
const $ = (id) => document.getElementById(id);
const state = { about: null, question: null, preview: null, serial: 0, shown: {}, least: 0.5, found: null, rules: [], columns: null };

/** Create an element with properties and children; strings become text. */
function h(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}
const fill = (place, ...children) => place.replaceChildren(...children.flat(Infinity).filter(Boolean));
const percent = (x, digits = 0) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(x > 0 && x < 0.095 && !digits ? 1 : digits)}%`);
/** Format a probability: in percent, or as 1 in N if it is near 0%. */
const odds = (x) => (x === null || x === undefined || x >= 0.01 ? percent(x) : x < 1e-6 ? "under 1 in a million" : `1 in ${count(Number((1 / x).toPrecision(2)))}`);
const figure = (x) => (x === null || x === undefined ? "–" : Math.abs(x) >= 1000 || (x && Math.abs(x) < 0.001) ? x.toExponential(2) : String(Number(x.toPrecision(4))));
const count = (n) => n.toLocaleString("en-US");

async function ask(path, values) {
  const [kind, body] = values instanceof Blob ? ["octet-stream", values] : ["json", JSON.stringify(values)];
  const answer = await fetch(`api/${path}`, values === undefined ? {} : {
    method: "POST", headers: { "Content-Type": `application/${kind}` }, body,
  });
  const found = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function complain(error) {
  const said = error instanceof TypeError ? "the explorer does not answer. Check that it is running" : error.message;
  $("error").textContent = said.charAt(0).toUpperCase() + said.slice(1);
  $("error").hidden = false;
  $("status").textContent = "";
}
let begun = 0;
/** Report that work begins; return a function that reports its end, unless other work has begun since. */
function begin(text) {
  const mine = (begun += 1), say = (line) => {
    if (mine !== begun) return;
    $("error").hidden = true;
    $("status").textContent = line;
  };
  say(text);
  return say;
}
async function attempt(work) {
  try { return await work(); } catch (error) { complain(error); return undefined; }
}

// --- items ---------------------------------------------------------------------------------------------------------
function tile(item, alt = "") {
  if (!item.picture && !item.thumbnail) return h("span.tile.none", {}, item.captions[0] || item.key);
  const place = h("span.tile", {});
  const image = h("img", { src: `thumbnail/${item.thumbnail || `item/${item.row}`}`, alt, loading: "lazy", decoding: "async" });
  image.addEventListener("error", () => { place.classList.add("none"); fill(place, "no image"); });
  place.append(image);
  return place;
}
const called = (item) => item.captions[0] || item.key;

function bar(share) {
  const inside = h("span", {});
  inside.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
  return inside;
}
/** Create a bar with its name and value. */
const meter = (name, value, share, kind = "") => [h("div", {}, name, h("b", {}, value)), h(`div.meter${kind && `.${kind}`}`, { ariaHidden: "true" }, bar(share))];
const mostBits = (side) => (state.about.units ? Math.log2(side === "image" ? state.about.units.texts : state.about.units.images) : 1);

function figuresOf(item) {
  const rows = [];
  if (item.probability !== undefined && item.probability !== null) rows.push(meter("match", odds(item.probability), item.probability));
  else if (item.score !== undefined) rows.push([h("div", {}, "score", h("b", {}, figure(item.score)))]);
  if (item.bits !== null) rows.push(meter("bits", item.bits.toFixed(1), item.bits / mostBits(state.about.side), "bits"));
  else if (state.about.probabilistic) rows.push([h("div", {}, "uncertainty", h("b", {}, figure(item.uncertainty)))]);
  return h("span.figures", {}, rows);
}

/** Create the card of an item, which can be searched by. */
function card(item, figures = true) {
  const name = called(item);
  const inside = [item.picture || item.thumbnail ? tile(item) : null, h("span.caption", { title: item.captions.join("\n") }, name), figures ? figuresOf(item) : null];
  if (item.reasons && item.reasons.length) inside.push(h("span.reasons", {}, item.reasons.join(", ")));
  if (item.row === null) return h("li", {}, h("div.card", {}, inside));
  return h("li", {}, h("button.card", { type: "button", ariaLabel: `Search by ${name}${spoken(item)}`, onclick: () => askBy({ row: item.row }, item) }, inside));
}
function spoken(item) {
  const parts = [];
  if (item.probability !== undefined && item.probability !== null) parts.push(`match ${odds(item.probability)}`);
  if (item.bits !== null) parts.push(`${item.bits.toFixed(1)} bits, matches ${item.fits}`);
  return parts.length ? `: ${parts.join(", ")}` : "";
}

// --- asking --------------------------------------------------------------------------------------------------------
/** Search; the chips show the query until the next one. */
async function askBy(question, item = null) {
  state.question = question;
  state.item = item;
  state.serial += 1;
  if (!question.text) $("text").value = "";
  chips();
  const view = ["beside", "path"].includes(selected()) ? selected() : "nearest";
  await show(view);
  if (view !== "nearest") { state.shown.nearest = state.serial; await nearest(false); }
}

async function submit(event) {
  if (event) event.preventDefault();
  const text = $("text").value.trim();
  const question = {};
  if (text) question.text = text;
  if (state.question && state.question.upload) question.upload = state.question.upload;
  if (!text && !question.upload) { complain(new Error("type a text, or choose an image")); $("text").focus(); return; }
  await askBy(question);
}

async function upload(file) {
  if (!file) return;
  if (!state.about || !state.about.can_ask) { complain(new Error("images need a model. Start with --model")); return; }
  if (file.size > LARGEST) {
    complain(new Error(`this file has ${count(file.size)} bytes: the limit is ${count(LARGEST)}`));
    return;
  }
  begin("Reading your image…");
  await attempt(async () => {
    const found = await ask("upload", file);
    if (state.preview) URL.revokeObjectURL(state.preview);
    state.preview = URL.createObjectURL(file);
    const text = $("text").value.trim();
    await askBy(text ? { text, upload: found.upload } : { upload: found.upload });
  });
}

function chips() {
  const question = state.question || {}, made = [];
  const drop = (name, rest) => h("button", { type: "button", ariaLabel: `Remove ${name}`, onclick: () => {
    state.question = rest;
    if (name === "the image") $("picture").value = "";
    if (name === "the text") $("text").value = "";
    if (rest) askBy(rest); else { state.found = null; state.serial += 1; chips(); clear(); }
    $("text").focus();
  } }, "×");
  if (question.text) made.push(h("li", {}, `“${question.text}”`, drop("the text", question.upload ? { upload: question.upload } : null)));
  if (question.upload) made.push(h("li", {}, h("img", { src: state.preview, alt: "" }), "your image", drop("the image", question.text ? { text: question.text } : null)));
  if (question.row !== undefined) {
    const picture = state.item && state.item.picture ? h("img", { src: `thumbnail/item/${question.row}`, alt: "" }) : null;
    made.push(h("li", {}, picture, state.item ? called(state.item) : `item ${question.row}`, drop("the item", null)));
  }
  fill($("chips"), made);
  $("asked").hidden = !made.length;
}

function clear() {
  for (const panel of ["nearest", "beside", "path"]) empty(panel, true);
  $("nearest").querySelector(".split").hidden = true;
  fill($("columns")); fill($("steps"));
  begin("");
  draw();
}
const empty = (panel, on) => { $(panel).querySelector(".empty").hidden = !on; };

/** Search, and show the nearest items of the current query. */
async function nearest(aloud = true) {
  if (!state.question) return;
  const serial = state.serial, say = aloud ? begin("Searching…") : () => {};
  const found = await attempt(() => ask("search", state.question));
  if (!found || serial !== state.serial) return;
  state.found = found;
  empty("nearest", false);
  $("nearest").querySelector(".split").hidden = false;
  fill($("answers"), found.answers.map((item) => card(item)));
  $("nearest-title").textContent = state.about.side === "text" ? "Nearest texts" : "Nearest items";
  const pairs = found.answers.some((item) => item.probability !== null);
  $("legend").textContent = `Ranked by ${found.by}. ${pairs ? "Match: the model's probability that the pair matches. " : "A query of the items' own kind has a score but no match probability. "}${state.about.units ? "Bits: the information of an item about its match." : ""}`;
  made(found);
  draw();
  const first = found.answers[0];
  say(found.answers.length ? `${found.answers.length} items; the nearest: ${called(first)}${spoken(first)}.` : "No items found.");
}

/** Show the meaning of a query: its information, and the reasons against an answer. */
function made(found) {
  const { question, verdict, risk } = found, parts = [];
  if (question.bits !== null) {
    parts.push(h("p.big", {}, `${question.bits.toFixed(1)} bits`), h("div.meter.bits", {}, bar(question.bits / mostBits(question.sides.includes("text") ? "text" : "image"))));
    parts.push(h("p.legend", {}, `It matches ${question.fits} of the training ${question.sides.includes("text") ? "images" : "texts"}.`));
  } else if (state.about.probabilistic) {
    parts.push(h("p.big", {}, figure(question.uncertainty)), h("p.legend", {}, "uncertainty (trace), without units."));
  }
  if (question.ambiguity !== undefined && question.ambiguity !== null) parts.push(h("p.legend", {}, `Ambiguity ${question.ambiguity.toFixed(1)} nats, as if ${count(Math.round(Math.exp(question.ambiguity)))} general captions matched it equally well.`));
  if (question.beyond) parts.push(h("p.legend", {}, "This image is farther from the training data than all data that the probability was fitted on."));
  if (question.rank !== undefined) {
    parts.push(h("p.legend", {}, `More uncertain than ${percent(question.rank)} of the ${question.sides.includes("text") ? "captions" : "items"} here.`));
  }
  if (risk) {
    parts.push(h(`p.verdict${risk.answers ? "" : ".refused"}`, {}, risk.answers ? "Answered: within the risk" : "Refused: the risk is too high"));
    parts.push(h("p.legend", {}, `${risk.compared}; ${risk.promise}.`));
  }
  if (verdict.probability !== null) parts.push(...judged(verdict));
  else if (verdict.familiar !== null) parts.push(...parted(verdict));
  if (found.said.length) {
    parts.push(h("hr.rule", {}), h("h2", {}, "Best captions"));
    parts.push(h("ol.said", {}, found.said.map((said) => h("li", {}, said.text, h("span", {}, said.probability === null ? figure(said.score) : odds(said.probability))))));
  }
  if (!parts.length) parts.push(h("p.legend", {}, "This model gives points and no probability, so it cannot refuse."));
  fill($("makes").querySelector("div"), parts);
}
function judged(verdict) {
  const said = h("p.verdict", {}), value = h("b", {});
  const range = h("input", { type: "range", id: "least-sure", min: 0, max: 100, value: Math.round(100 * state.least), oninput: tell });
  function tell() {
    state.least = range.value / 100;
    const refused = verdict.probability < state.least;
    said.classList.toggle("refused", refused);
    said.textContent = refused ? "The model would refuse this" : "The model would answer this";
    value.textContent = `${range.value}%`;
  }
  tell();
  const what = verdict.among === "captions" ? "its first caption is right" : "its first answer is right";
  return [h("hr.rule", {}), said, h("p.legend", {}, `Probability that ${what}, and that the query is familiar: ${percent(verdict.probability)}.`),
    h("div.slider", {}, h("label", { htmlFor: "least-sure" }, "Refuse below ", value), range), ...parted(verdict)];
}
function parted(verdict) {
  return [h("p.legend", {}, "Reasons against an answer, in nats (they add up):"),
    h("dl.parts", {}, verdict.parts.map((part) => [h("dt", {}, part.name, h("b", {}, part.nats === null ? "∞" : part.nats.toFixed(2))),
      h("dd", {}, h("div.meter.against", { ariaHidden: "true" }, bar(part.nats === null ? 1 : 1 - Math.exp(-part.nats))), part.text)]))];
}

async function beside() {
  if (!state.question) return;
  empty("beside", false);
  const say = begin("Ranking by each score…");
  const serial = state.serial, found = await attempt(() => ask("compare", state.question));
  if (!found || serial !== state.serial) return;
  $("columns").style.setProperty("--count", found.columns.length);
  fill($("columns"), found.columns.map((column) => h(`section${column.own ? ".own" : ""}`, { ariaLabel: column.score },
    h("h2", {}, column.score, column.own ? h("span.hint", {}, " (this index)") : null),
    h("ol", {}, column.answers.map((item, rank) => moved(item, rank, column.own))))));
  const rest = found.whole ? "" : ` Other scores rank only the ${count(found.among)} nearest items by ${found.columns[0].score}.`;
  say(`${found.columns.length} scores.${rest}`);
}
function moved(item, rank, own) {
  const mark = own ? h("span.move", {}, figure(item.score))
    : item.before === null ? h("span.move.new", {}, "new")
    : item.before > rank ? h("span.move.up", {}, `▲ ${item.before - rank}`)
    : item.before < rank ? h("span.move.down", {}, `▼ ${rank - item.before}`) : h("span.move", {}, "same");
  const label = `${rank + 1}: ${called(item)}, ${mark.textContent.replace("▲", "up").replace("▼", "down")}. Search by it`;
  return h("li", {}, h("button.card", { type: "button", ariaLabel: label, onclick: () => askBy({ row: item.row }, item) },
    tile(item), h("span", {}, h("span.caption", {}, called(item)), mark)));
}

async function path() {
  if (!state.question) return;
  empty("path", false);
  const say = begin("Finding the path…");
  const root = document.querySelector("input[name=root]:checked").value, serial = state.serial;
  const found = await attempt(() => ask("walk", { ...state.question, root }));
  if (!found || serial !== state.serial) { if (!found) fill($("steps")); return; }
  const steps = found.steps.map((step) => h("li", {},
    h("div", {}, h("p.word", {}, step.text || "“”"), h("p.says", {}, step.bits === null ? (state.about.probabilistic ? `uncertainty ${figure(step.uncertainty)}` : "") : `${step.bits.toFixed(1)} bits; matches ${step.fits}`)),
    step.pictures ? h("div.row", {}, step.pictures.map((item) => h("button", { type: "button", ariaLabel: `Search by ${called(item)}`, title: called(item), onclick: () => askBy({ row: item.row }, item) }, tile(item)))) : null));
  const end = found.root === "empty" ? "“”" : `halfway between “${found.root_text}” and “”`;
  fill($("steps"), steps, h("li", {}, h("div", {}, h("p.word", {}, "[ROOT]"), h("p.says", {}, end))));
  say(`${found.steps.length} captions on the path, of ${count(found.among)}.`);
}

async function uncertain() {
  if (state.shown.uncertain) return;
  const say = begin("Reading…");
  const found = await attempt(() => ask("uncertain"));
  if (!found) return;
  state.shown.uncertain = true;
  fill($("least"), found.least.map((item) => card(item)));
  fill($("most"), found.most.map((item) => card(item)));
  say("");
}

// --- the map -------------------------------------------------------------------------------------------------------
const view = { x: 0, y: 0, scale: 1, points: [], chosen: -1, images: new Map(), drag: null, radius: 0 };

async function map() {
  if (!state.shown.map) {
    const say = begin("Drawing the map…");
    const found = await attempt(() => ask("map"));
    if (!found) return;
    state.shown.map = true;
    view.points = found.points;
    const some = found.points.length < found.total ? `${count(found.points.length)} of ${count(found.total)} items, drawn at random` : `All ${count(found.total)} items`;
    $("map-lead").textContent = `${some}, in the plane of their largest variance (${percent(found.share[0])} and ${percent(found.share[1])}). Near items may be far apart in the other dimensions.`;
    $("map-legend").hidden = !state.about.probabilistic;
    say("");
  }
  whole();
}
function size() {
  const canvas = $("canvas"), ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  canvas.width = Math.round(box.width * ratio); canvas.height = Math.round(box.height * ratio);
  return { width: box.width, height: box.height, ratio };
}
function whole() {
  if (!view.points.length) return;
  const { width, height } = size(), xs = view.points.map((p) => p.at[0]), ys = view.points.map((p) => p.at[1]);
  const low = [Math.min(...xs), Math.min(...ys)], high = [Math.max(...xs), Math.max(...ys)];
  view.scale = Math.min(width / (high[0] - low[0] || 1), height / (high[1] - low[1] || 1)) * 0.88;
  view.x = (low[0] + high[0]) / 2; view.y = (low[1] + high[1]) / 2;
  draw();
}
const onScreen = (at, box) => [box.width / 2 + (at[0] - view.x) * view.scale, box.height / 2 - (at[1] - view.y) * view.scale];
function colours() {
  const style = getComputedStyle(document.documentElement), read = (name) => style.getPropertyValue(name).trim();
  const parts = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
  const [a, b] = [parts(read("--ramp-0")), parts(read("--ramp-1"))];
  return { of: (level, alpha) => `rgba(${a.map((x, i) => Math.round(x + (b[i] - x) * level)).join(",")},${alpha})`, ink: read("--ink"), accent: read("--accent"), paper: read("--paper"), line: read("--line") };
}
function ellipse(pen, at, box, sigmas = 1) {
  const [x, y] = onScreen(at, box);
  pen.beginPath();
  pen.ellipse(x, y, Math.max(0.5, at[2] * view.scale * sigmas), Math.max(0.5, at[3] * view.scale * sigmas), -at[4], 0, 2 * Math.PI);
}
function draw() {
  if (!view.points.length || $("map").hidden) return;
  const box = size(), pen = $("canvas").getContext("2d"), colour = colours();
  pen.setTransform(box.ratio, 0, 0, box.ratio, 0, 0);
  pen.clearRect(0, 0, box.width, box.height);
  const seen = view.points.map((point, i) => ({ point, i, at: onScreen(point.at, box) })).filter(({ at }) => at[0] > -60 && at[1] > -60 && at[0] < box.width + 60 && at[1] < box.height + 60);
  const tint = (point) => (state.about.probabilistic ? point.level : 0);
  if ($("ellipses").checked && state.about.probabilistic) {
    const faint = Math.min(1, 800 / seen.length); // many overlap
    for (const { point } of seen) { ellipse(pen, point.at, box); pen.fillStyle = colour.of(tint(point), 0.06 * faint); pen.fill(); pen.strokeStyle = colour.of(tint(point), 0.28 * faint); pen.lineWidth = 0.8; pen.stroke(); }
  }
  for (const { point, at } of seen) { pen.beginPath(); pen.arc(at[0], at[1], 2.4, 0, 2 * Math.PI); pen.fillStyle = colour.of(tint(point), 0.9); pen.fill(); }
  if ($("pictures").checked) picturesOf(seen, pen, box, colour);
  if (view.chosen >= 0) mark(pen, view.points[view.chosen].at, box, colour.ink, colour);
  if (state.found && state.found.place && state.question) mark(pen, state.found.place, box, colour.accent, colour, "your query");
}
/** Draw the images of items that are too far apart to overlap. */
function picturesOf(seen, pen, box, colour) {
  const edge = box.width < 500 ? 34 : 44, taken = new Set();
  for (const { point, at } of seen) {
    if (!point.picture) continue;
    const cell = [Math.round(at[0] / (edge * 1.25)), Math.round(at[1] / (edge * 1.25))];
    const near = [-1, 0, 1].some((i) => [-1, 0, 1].some((j) => taken.has(`${cell[0] + i},${cell[1] + j}`)));
    if (near) continue;
    taken.add(cell.join(","));
    const image = pictureOf(point.row);
    if (!image.complete || !image.naturalWidth) continue;
    const scale = edge / Math.max(image.naturalWidth, image.naturalHeight), width = image.naturalWidth * scale, height = image.naturalHeight * scale;
    pen.fillStyle = "#fff"; pen.strokeStyle = colour.of(state.about.probabilistic ? point.level : 0, 1); pen.lineWidth = 1.2;
    pen.beginPath(); pen.roundRect(at[0] - edge / 2 - 2, at[1] - edge / 2 - 2, edge + 4, edge + 4, 6); pen.fill(); pen.stroke();
    pen.drawImage(image, at[0] - width / 2, at[1] - height / 2, width, height);
  }
}
function pictureOf(row) {
  if (!view.images.has(row)) {
    const image = new Image();
    image.addEventListener("load", later);
    image.src = `thumbnail/item/${row}`;
    view.images.set(row, image);
  }
  return view.images.get(row);
}
let waiting = 0;
function later() { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); }
function mark(pen, at, box, tint, colour, label = "") {
  const [x, y] = onScreen(at, box);
  if (state.about.probabilistic) { ellipse(pen, at, box); pen.strokeStyle = tint; pen.lineWidth = 2; pen.stroke(); }
  pen.beginPath(); pen.arc(x, y, 6, 0, 2 * Math.PI); pen.fillStyle = tint; pen.fill(); pen.strokeStyle = colour.paper; pen.lineWidth = 2; pen.stroke();
  if (!label) return;
  pen.font = "600 13px system-ui, sans-serif"; pen.lineWidth = 4; pen.strokeStyle = colour.paper; pen.lineJoin = "round";
  const left = Math.max(4, Math.min(box.width - pen.measureText(label).width - 4, x + 10));
  pen.strokeText(label, left, y - 10); pen.fillStyle = tint; pen.fillText(label, left, y - 10);
}
function choose(i) {
  view.chosen = i;
  const item = view.points[i];
  fill($("chosen"), h("ol.cards", {}, card(item)));
  $("chosen").firstChild.style.gridTemplateColumns = "minmax(0, 220px)";
  const box = $("canvas").getBoundingClientRect(), [x, y] = onScreen(item.at, box);
  if (x < 30 || y < 30 || x > box.width - 30 || y > box.height - 30) { view.x = item.at[0]; view.y = item.at[1]; }
  draw();
}
function zoom(factor, x, y) {
  const box = $("canvas").getBoundingClientRect(), at = [x ?? box.width / 2, y ?? box.height / 2];
  const before = [view.x + (at[0] - box.width / 2) / view.scale, view.y - (at[1] - box.height / 2) / view.scale];
  view.scale *= factor;
  view.x = before[0] - (at[0] - box.width / 2) / view.scale; view.y = before[1] + (at[1] - box.height / 2) / view.scale;
  draw();
}
function nearestPoint(x, y, within = 40) {
  const box = $("canvas").getBoundingClientRect();
  let best = -1, least = within ** 2;
  view.points.forEach((point, i) => {
    const at = onScreen(point.at, box), squared = (at[0] - x) ** 2 + (at[1] - y) ** 2;
    if (squared < least) { least = squared; best = i; }
  });
  return best;
}
/** Choose the nearest item within 45 degrees of a direction. */
function step(dx, dy) {
  if (view.chosen < 0) { choose(nearestPoint($("canvas").clientWidth / 2, $("canvas").clientHeight / 2, 1e9)); return; }
  const from = view.points[view.chosen].at;
  let best = -1, least = Infinity;
  view.points.forEach((point, i) => {
    const along = (point.at[0] - from[0]) * dx + (point.at[1] - from[1]) * dy, across = Math.abs((point.at[0] - from[0]) * dy) + Math.abs((point.at[1] - from[1]) * dx);
    if (i !== view.chosen && along > 1e-9 && across <= along && along + across < least) { least = along + across; best = i; }
  });
  if (best >= 0) choose(best);
}
function canvasEvents() {
  const canvas = $("canvas"), place = (event) => [event.offsetX, event.offsetY];
  canvas.addEventListener("keydown", (event) => {
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    if (event.key in ways) step(...ways[event.key]);
    else if (event.key === "+" || event.key === "=") zoom(1.4);
    else if (event.key === "-") zoom(1 / 1.4);
    else if (event.key === "0") whole();
    else if (event.key === "Enter" && view.chosen >= 0) askBy({ row: view.points[view.chosen].row }, view.points[view.chosen]);
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("wheel", (event) => { if (!event.ctrlKey && document.activeElement !== canvas) return; event.preventDefault(); zoom(Math.exp(-event.deltaY / 400), ...place(event)); }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { view.drag = { at: [event.clientX, event.clientY], from: [view.x, view.y], moved: false }; });
  canvas.addEventListener("pointermove", (event) => {
    if (!view.drag || !(event.buttons & 1)) return;
    const by = [event.clientX - view.drag.at[0], event.clientY - view.drag.at[1]];
    if (Math.abs(by[0]) + Math.abs(by[1]) > 5) { view.drag.moved = true; canvas.setPointerCapture(event.pointerId); }
    if (view.drag.moved) { view.x = view.drag.from[0] - by[0] / view.scale; view.y = view.drag.from[1] + by[1] / view.scale; draw(); }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (view.drag && !view.drag.moved) { const found = nearestPoint(...place(event)); if (found >= 0) choose(found); }
    view.drag = null;
  });
}

// --- rules ---------------------------------------------------------------------------------------------------------
async function rules() {
  if (state.columns) return;
  const say = begin("Reading the samples' signals…");
  const found = await attempt(() => ask("columns"));
  if (!found) return;
  say("");
  if (state.columns) return;
  state.columns = found;
  $("rules-lead").textContent = `Which samples would you train on? Counted on ${found.source}. A rule drops the samples for which it is true.`;
  const names = found.columns.filter((column) => column.quantiles.length).map((column) => column.name);
  $("add").disabled = !names.length;
  const first = ["normalised_score", "match_probability", "text_bits", "image_bits", "text_uncertainty", "image_uncertainty"].find((name) => names.includes(name)) || names[0];
  if (first) addRule({ column: first, below: first !== "image_uncertainty" && first !== "text_uncertainty", at: 10 }); else await tried();
}
function nameFor(base) {
  const taken = new Set(state.rules.map((rule) => rule.name));
  if (!taken.has(base)) return base;
  for (let i = 2; ; i += 1) if (!taken.has(`${base}${i}`)) return `${base}${i}`;
}
const columnOf = (name) => state.columns.columns.find((column) => column.name === name);
const textOf = (rule) => `${rule.name}: ${rule.formula !== undefined ? rule.formula : `${rule.column} ${rule.below ? "<" : ">"} ${columnOf(rule.column).quantiles[rule.at]}`}`;

function addRule(values) {
  const rule = { name: nameFor(values.formula !== undefined ? "mine" : values.below ? "low" : "high"), ...values };
  const id = `rule${Math.random().toString(36).slice(2, 8)}`;
  const outcome = h("p.outcome", {}), changed = () => { paint(); soon(); };
  rule.outcome = outcome;
  const name = h("input", { type: "text", id: `${id}n`, value: rule.name, maxLength: 40, oninput: () => { rule.name = name.value.trim(); soon(); } });
  const remove = h("button", { type: "button", ariaLabel: `Remove the rule ${rule.name}`, onclick: () => {
    state.rules = state.rules.filter((other) => other !== rule); row.remove(); $("add").focus(); soon();
  } }, "Remove");
  const named = h("div.field", {}, h("label", { htmlFor: `${id}n` }, "Name"), name);
  let row, paint = () => {};
  if (rule.formula !== undefined) {
    const formula = h("input", { type: "text", id: `${id}f`, value: rule.formula, maxLength: 400, spellcheck: false, oninput: () => { rule.formula = formula.value; soon(); } });
    row = h("li", {}, h("div.grid.free", {}, named, h("div.field", {}, h("label", { htmlFor: `${id}f` }, "Drop if"), formula), remove), outcome);
  } else {
    const column = h("select", { id: `${id}c`, onchange: () => { rule.column = column.value; changed(); } }, state.columns.columns.filter((one) => one.quantiles.length).map((one) => h("option", { value: one.name, selected: one.name === rule.column }, one.name)));
    const way = h("select", { id: `${id}w`, onchange: () => { rule.below = way.value === "below"; changed(); } }, h("option", { value: "below", selected: rule.below }, "below"), h("option", { value: "above", selected: !rule.below }, "above"));
    const range = h("input", { type: "range", id: `${id}r`, min: 0, max: 100, value: rule.at, oninput: () => { rule.at = Number(range.value); changed(); } });
    const label = h("label", { htmlFor: `${id}r` }), bars = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    bars.setAttribute("class", "bars"); bars.setAttribute("viewBox", "0 0 400 54"); bars.setAttribute("preserveAspectRatio", "none"); bars.setAttribute("aria-hidden", "true");
    const meaning = h("p.legend", {});
    paint = () => {
      const one = columnOf(rule.column), value = one.quantiles[rule.at], low = one.quantiles[0], high = one.quantiles[100], most = Math.max(...one.bars);
      label.textContent = `${rule.below ? "below" : "above"} ${figure(value)} (quantile ${rule.at}%)`;
      range.setAttribute("aria-valuetext", `${figure(value)}, quantile ${rule.at} percent`);
      meaning.textContent = one.meaning;
      const wide = 400 / one.bars.length;
      bars.replaceChildren(...one.bars.map((n, i) => {
        const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect"), middle = low + (high - low) * (i + 0.5) / one.bars.length, tall = Math.max(n ? 1 : 0, 54 * n / most);
        for (const [key, v] of Object.entries({ x: i * wide + 0.5, width: wide - 1, y: 54 - tall, height: tall })) rect.setAttribute(key, v);
        if (rule.below ? middle < value : middle > value) rect.setAttribute("class", "gone");
        return rect;
      }));
    };
    row = h("li", {}, h("div.grid", {}, named, h("div.field", {}, h("label", { htmlFor: `${id}c` }, "Drop if"), column), h("div.field", {}, h("label", { htmlFor: `${id}w` }, "is"), way), remove),
      bars, h("div.slider", {}, range, label), meaning, outcome);
    paint();
  }
  state.rules.push(rule);
  $("list").append(row);
  soon();
  return row;
}
let timer = 0;
function soon() { clearTimeout(timer); timer = setTimeout(tried, 120); }
async function tried() {
  const mine = [...state.rules], serial = (state.tries = (state.tries || 0) + 1);
  let found;
  try { found = await ask("rules", { rules: mine.map(textOf) }); } catch (error) {
    if (serial !== state.tries) return;
    const wrong = mine.find((rule) => rule.formula !== undefined && error.message.includes(rule.formula)) || mine[mine.length - 1];
    for (const rule of mine) { rule.outcome.classList.remove("wrong"); rule.outcome.textContent = ""; }
    if (wrong) { wrong.outcome.classList.add("wrong"); wrong.outcome.textContent = error.message; } else complain(error);
    return;
  }
  if (serial !== state.tries) return;
  $("error").hidden = true;
  const share = found.rows ? found.kept / found.rows : 0;
  fill($("kept"), h("span.big", {}, percent(share, 1)), ` – ${count(found.kept)} of ${count(found.rows)} kept${found.unusable ? `; ${count(found.unusable)} unreadable` : ""}`);
  $("kept-bar").firstElementChild.style.width = `${100 * share}%`;
  mine.forEach((rule, i) => { rule.outcome.classList.remove("wrong"); fill(rule.outcome, "drops ", h("b", {}, count(found.rules[i].dropped)), ` (${percent(found.rules[i].dropped / found.rows, 1)}), ${count(found.rules[i].alone)} only by this rule`); });
  $("curating").hidden = !found.command;
  $("command").textContent = found.command;
  fill($("goes"), found.shown.dropped.map((item) => card(item, false)));
  fill($("stays"), found.shown.kept.map((item) => card(item, false)));
}

// --- the page ------------------------------------------------------------------------------------------------------
const views = { nearest, beside, path, map, uncertain, rules };
const selected = () => document.querySelector("[role=tab][aria-selected=true]").getAttribute("aria-controls");
/** Show a panel; remember: in the address, which also moves the next Tab key there, so not at the start. */
function select(name, remember) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const on = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !on;
    if (on && remember) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  if (remember) history.replaceState(null, "", `#${name}`);
}
/** Show a view; compute it if it has not shown this query. */
async function show(name, remember = true) {
  select(name, remember);
  $("error").hidden = true;
  if (["nearest", "beside", "path"].includes(name)) {
    if (state.shown[name] === state.serial) return;
    state.shown[name] = state.serial;
  }
  await views[name]();
}
function facts(about) {
  const parts = [`${count(about.items)} ${about.side === "text" ? "texts" : "items"}`, `${about.dim} dimensions`];
  if (about.model) parts.push(about.model.replace(/^local-dir:.*?([^/]+\/[^/]+)\/?$/, "$1"));
  parts.push(`ranked by ${about.score}`);
  return parts.join(" · ");
}
async function start() {
  $("ask").addEventListener("submit", submit);
  $("picture").addEventListener("change", () => upload($("picture").files[0]));
  document.addEventListener("paste", (event) => { const file = [...(event.clipboardData?.files || [])][0]; if (file) upload(file); });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      document.body.classList.toggle("over", kind === "dragover");
      if (kind === "drop") upload(event.dataTransfer.files[0]);
    });
  }
  const tabs = [...document.querySelectorAll("[role=tab]")];
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => show(tab.getAttribute("aria-controls")));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      tabs[to % tabs.length].focus();
      show(tabs[to % tabs.length].getAttribute("aria-controls"));
    });
  });
  $("root").addEventListener("change", path);
  $("nearer").addEventListener("click", () => zoom(1.4));
  $("farther").addEventListener("click", () => zoom(1 / 1.4));
  $("whole").addEventListener("click", whole);
  for (const id of ["ellipses", "pictures"]) $(id).addEventListener("change", draw);
  canvasEvents();
  window.addEventListener("resize", later);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  $("add").addEventListener("click", () => { const column = state.columns.columns.find((one) => one.quantiles.length); addRule({ column: column.name, below: true, at: 10 }).querySelector("select").focus(); });
  $("formula").addEventListener("click", () => { const one = state.columns?.columns[0]; addRule({ formula: one ? `${one.name} < quantile(${one.name}, 0.1)` : "" }).querySelectorAll("input")[1].focus(); });
  $("copy").addEventListener("click", async () => { await navigator.clipboard.writeText($("command").textContent); $("copy").textContent = "Copied"; setTimeout(() => { $("copy").textContent = "Copy"; }, 1500); });
  state.about = await attempt(() => ask("about"));
  if (!state.about) return;
  $("about").textContent = facts(state.about);
  if (state.about.lacks.length) { $("lacks").hidden = false; $("lacks").open = !state.about.can_ask; fill($("lacks").querySelector("ul"), state.about.lacks.map((text) => h("li", {}, text))); }
  for (const field of ["text", "picture"]) $(field).disabled = !state.about.can_ask;
  $("ask").querySelector(".main").disabled = !state.about.can_ask;
  const name = location.hash.slice(1);
  await show(name in views ? name : "nearest", false);
  document.documentElement.dataset.ready = "yes";
}
start();

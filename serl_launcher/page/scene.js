// A scene drawn from a state without cameras: where its entries name a point, such as tool.x, tool.y and tool.z, it is
// seen from above and from the side, within all places where a point of this robot was seen since the page was opened.
const POINTS = ["tool", "point", "block", "object", "goal"], VIEWS = { "from above": ["x", "y"], "from the side": ["x", "z"] };
const LEFT = 60, LINE = 8; // from there on a name is to the left of its point; the height of one
const NAMESPACE = "http://www.w3.org/2000/svg", seen = new Map(); // robot: {axis: [lowest, highest]}

// The views that a state has: [[title, [{name, x, y}]]], each number between 0 and 100.
export function views(robot, state) {
  const values = new Map(state.map(({ name, value }) => [name, Number(value)]));
  const ends = seen.get(robot) ?? seen.set(robot, {}).get(robot);
  for (const point of POINTS)
    for (const axis of "xyz") {
      const value = values.get(`${point}.${axis}`);
      if (!Number.isFinite(value)) continue;
      const [low, high] = ends[axis] ?? [value, value];
      ends[axis] = [Math.min(low, value), Math.max(high, value)];
    }
  const size = Math.max(...Object.values(ends).map(([low, high]) => high - low)) || 1;
  const share = (axis, value) => 50 + (80 * (value - (ends[axis][0] + ends[axis][1]) / 2)) / size;
  return Object.entries(VIEWS).map(([title, [across, up]]) => [title, POINTS.flatMap((name) => {
    const [x, y] = [across, up].map((axis) => values.get(`${name}.${axis}`));
    return Number.isFinite(x) && Number.isFinite(y) ? [{ name, x: share(across, x), y: 100 - share(up, y) }] : [];
  })]).filter(([, points]) => points.length);
}

export function view([title]) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  const svg = document.createElementNS(NAMESPACE, "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("role", "img");
  caption.textContent = title;
  figure.append(svg, caption);
  return figure;
}

export function show(figure, [title, points]) {
  const parts = [], lowest = new Map(); // of the names on either side
  for (const { name, x, y } of points.toSorted((one, other) => one.y - other.y)) {
    const isLeft = x > LEFT, height = Math.max(y + 3, (lowest.get(isLeft) ?? -LINE) + LINE); // none lies over another
    lowest.set(isLeft, height);
    parts.push(part("circle", { class: name, cx: x, cy: y, r: 4 }),
      part("text", { x: isLeft ? x - 6 : x + 6, y: height, "text-anchor": isLeft ? "end" : "start" }, name));
  }
  figure.firstChild.setAttribute("aria-label", `${points.map(({ name }) => name).join(", ")}, ${title}`);
  figure.firstChild.replaceChildren(...parts);
}

function part(kind, attributes, text = "") {
  const made = document.createElementNS(NAMESPACE, kind);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// All words of a caption as small pictures, one a word, each with where the model looked for it.

import { canvasOf, make } from "./dom.js";
import { paintOver } from "./overlay.js";
import { Ruler, shown } from "./text.js";

const AREA = 9600; // pixels of a small picture, whatever its shape
const ROUGH = 96; // pixels of its smoothed map

export class Strip {
  /** `events`: point(word or null, event), pin(word). */
  constructor({ look, events }) {
    Object.assign(this, { look, events });
    this.shots = [];
    this.el = make("div", { class: "jm-shots", role: "group", aria: { label: "Where it looked, word by word" } });
  }

  /** `words`, and the picture's width by its height. */
  fill(words, ratio) {
    const wide = Math.sqrt(AREA * ratio),
      shrink = Math.min(1, 220 / wide, 170 / (wide / ratio));
    this.size = [Math.round(wide * shrink), Math.round((wide / ratio) * shrink)];
    this.words = words;
    this.el.style.setProperty("--shot", `${Math.max(76, this.size[0])}px`);
    this.shots = words.map((text, n) => {
      const canvas = make("canvas", { aria: { hidden: "true" } }),
        name = make("span", { class: "jm-shot-word", dir: "auto", text });
      const el = make(
        "button",
        {
          type: "button",
          class: "jm-shot",
          tabindex: "-1", // the words of the caption are the same choice
          title: text,
          data: { word: n },
          aria: { label: `${text}: where it looked`, pressed: "false" },
          onpointerenter: (event) => this.events.point(n, event),
          onpointerleave: (event) => this.events.point(null, event),
          onclick: () => this.events.pin(n),
        },
        [canvas, name],
      );
      return { el, canvas, name };
    });
    this.el.replaceChildren(...this.shots.map((shot) => shot.el));
  }

  /** `about(n)`: what paintOver needs for a word, but for the size. */
  paint(image, about) {
    const [wide, tall] = this.size;
    this.shots.forEach(({ canvas }, n) => {
      const context = canvasOf(canvas, wide, tall);
      context.drawImage(image, 0, 0, wide, tall);
      paintOver(context, { ...about(n), wide, tall, fine: ROUGH });
    });
  }

  /** `tint(element, n)` shades the name of a word. */
  mark({ chosen, pinned }, tint) {
    this.shots.forEach(({ el, name }, n) => {
      el.classList.toggle("jm-at", n === chosen && n !== pinned);
      el.classList.toggle("jm-is-pinned", n === pinned);
      el.setAttribute("aria-pressed", `${n === pinned}`);
      tint(name, n);
    });
  }

  /** As a picture to keep: the photo and all small pictures with their words. */
  save(image, about) {
    const [wide, tall] = this.size.map((length) => 2 * length),
      cell = Math.max(wide, 150),
      gap = 14,
      line = 30,
      count = this.words.length + 1;
    const cols = Math.min(count, Math.max(2, Math.round(Math.sqrt((1.7 * count * (tall + line)) / cell)))),
      rows = Math.ceil(count / cols);
    const canvas = make("canvas", {
        width: cols * (cell + gap) + gap,
        height: rows * (tall + line + gap) + gap,
      }),
      context = canvas.getContext("2d"),
      ruler = new Ruler();
    context.fillStyle = this.look.inks.page;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.font = `17px ${this.look.family}`;
    context.textAlign = "center";
    ruler.use(context.font);
    for (let n = 0; n < count; n += 1) {
      context.save();
      context.translate(
        gap + (n % cols) * (cell + gap) + (cell - wide) / 2,
        gap + Math.floor(n / cols) * (tall + line + gap),
      );
      context.drawImage(image, 0, line, wide, tall);
      if (n) {
        context.fillStyle = this.look.inks.ink;
        context.fillText(ruler.fit(shown(this.words[n - 1], 60), cell), wide / 2, line - 9);
        context.translate(0, line);
        paintOver(context, { ...about(n - 1), wide, tall });
      }
      context.restore();
    }
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }
}

// Speech: its alignment to the text, above its spectrogram.

import { count, curveOf } from "./colours.js";
import { canvasOf, make } from "./dom.js";
import { Ruler, shown } from "./text.js";

/** An alignment as speech people draw it: time to the right, the text upwards, and the sound below. */
export class SpeechView {
  /** `events`: strip(), a promise of the whole map in few cells; tell(text or null, event). */
  constructor({ look, events }) {
    Object.assign(this, { look, events });
    this.ruler = new Ruler();
    this.canvas = make("canvas", {
      role: "img",
      aria: { label: "Alignment of speech and text, above its spectrogram" },
      onpointermove: (event) => this.point(event),
      onpointerleave: () => this.point(null),
    });
    this.el = make("div", { class: "jm-speech" }, [this.canvas]);
    this.watch = new ResizeObserver(() => this.paint());
    this.watch.observe(this.el);
  }

  async show(content, speech) {
    Object.assign(this, { content, speech });
    const text = atob(speech.mel);
    this.mel = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    const answer = await this.events.strip();
    if (this.content !== content || !answer) return;
    this.map = answer;
    this.paint();
  }

  paint() {
    const { clientWidth: width, clientHeight: height } = this.el;
    if (!this.map || width < 60 || height < 60) return;
    const { look, content } = this,
      { inks } = look,
      context = canvasOf(this.canvas, width, height),
      { cols: texts, shape } = content;
    this.ruler.use(look.font);
    const words = Array.from({ length: shape[1] }, (_, n) => (texts ? shown(texts[n]) : count(n)));
    const left = Math.min(120, Math.max(...words.slice(0, 400).map((text) => this.ruler.width(text)))) + 18;
    const wide = width - left - 12,
      tall = Math.max(80, (height - 58) * 0.6),
      low = height - 58 - tall;
    this.box = { x: left, y: 8, w: wide, h: tall, low: { y: tall + 22, h: low } };
    this.paintMap(context, this.map, this.box);
    this.paintMel(context, this.box);
    context.textBaseline = "middle";
    context.fillStyle = inks.ink;
    const every = Math.max(1, Math.ceil(14 / (tall / shape[1])));
    for (let n = 0; n < shape[1]; n += every) {
      const y = 8 + tall - ((n + 0.5) * tall) / shape[1];
      context.font = look.font;
      context.textAlign = "right";
      context.fillText(this.ruler.fit(words[n], left - 14), left - 8, y);
    }
    this.paintTime(context, this.box, height);
    if (this.hover) {
      const x = left + ((this.hover.row + 0.5) * wide) / shape[0];
      context.strokeStyle = inks.pin;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(x, 8);
      context.lineTo(x, this.box.low.y + low);
      context.stroke();
    }
  }

  paintMap(context, { rows, cols, values, most }, box) {
    const image = make("canvas", { width: rows, height: cols }),
      data = new ImageData(rows, cols),
      pixels = new Uint32Array(data.data.buffer);
    const { to } = curveOf("root", 0, most || 1);
    for (let row = 0; row < rows; row += 1) {
      for (let col = 0; col < cols; col += 1)
        pixels[(cols - 1 - col) * rows + row] = this.look.colours[Math.round(to(values[row * cols + col]) * 255)];
    }
    image.getContext("2d").putImageData(data, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, box.x, box.y, box.w, box.h);
  }

  paintMel(context, box) {
    const [bins, frames] = this.speech.shape,
      used = Math.min(frames, this.content.shape[0] * this.speech.step);
    const image = make("canvas", { width: frames, height: bins }),
      data = new ImageData(frames, bins),
      pixels = new Uint32Array(data.data.buffer);
    for (let bin = 0; bin < bins; bin += 1)
      for (let n = 0; n < frames; n += 1)
        pixels[(bins - 1 - bin) * frames + n] = this.look.glowColours[this.mel[bin * frames + n]];
    image.getContext("2d").putImageData(data, 0, 0);
    context.imageSmoothingEnabled = true;
    const part = used / (this.content.shape[0] * this.speech.step); // queries beyond the sound have none
    context.drawImage(image, 0, 0, used, bins, box.x, box.low.y, box.w * part, box.low.h);
  }

  paintTime(context, box, height) {
    const length = this.content.shape[0] * this.speech.step * this.speech.seconds;
    const step =
      [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300].find((value) => (value / length) * box.w >= 56) ??
      600;
    context.font = this.look.smallFont;
    context.fillStyle = this.look.inks.soft;
    context.textAlign = "center";
    for (let time = 0; time <= length; time += step)
      context.fillText(
        `${Number(time.toFixed(2))} s`,
        Math.max(box.x + 8, Math.min(box.x + box.w - 10, box.x + (time / length) * box.w)),
        height - 14,
      );
  }

  point(event) {
    this.hover = null;
    if (event && this.map && this.box) {
      const row = Math.floor(((event.offsetX - this.box.x) / this.box.w) * this.map.rows);
      if (row >= 0 && row < this.map.rows) {
        const values = this.map.values.subarray(row * this.map.cols, (row + 1) * this.map.cols);
        let best = 0;
        for (let n = 0; n < values.length; n += 1) if (values[n] > values[best]) best = n;
        const scale = this.content.shape[0] / this.map.rows,
          place = Math.floor(best * (this.content.shape[1] / this.map.cols));
        this.hover = { row: Math.floor(row * scale) };
        const seconds = (this.hover.row * this.speech.step * this.speech.seconds).toFixed(2);
        this.events.tell(
          {
            token: `${seconds} s → ${this.content.cols ? shown(this.content.cols[place]) : count(place)}`,
            place,
            value: values[best],
          },
          event,
        );
      }
    }
    if (!this.hover) this.events.tell(null);
    this.paint();
  }

  refresh() {
    this.paint();
  }

  close() {
    this.watch.disconnect();
  }
}
